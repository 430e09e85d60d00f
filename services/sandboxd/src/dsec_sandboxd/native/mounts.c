/* A sandbox's root by descriptors alone: no path of the host is ever part of it. */
#include "spawner.h"

#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <linux/magic.h>

static int finish(int context, unsigned attributes)
{
    int mount_fd = -1;
    if (fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        mount_fd = fsmount(context, FSMOUNT_CLOEXEC, attributes);
    return mount_fd;
}

int mount_layer(int image_fd, struct failure *failure)
{
    char source[64];
    int context = fsopen("erofs", FSOPEN_CLOEXEC), mount_fd = -1;

    if (context < 0)
        return fail(failure, STEP_LAYER_MOUNT);
    snprintf(source, sizeof source, "/proc/self/fd/%d", image_fd);
    /* Else each page is in memory twice, as the image's and as the layer's. Older kernels lack it. */
    (void)fsconfig(context, FSCONFIG_SET_FLAG, "directio", NULL, 0);
    if (fsconfig(context, FSCONFIG_SET_STRING, "source", source, 0) == 0 &&
        fsconfig(context, FSCONFIG_SET_FLAG, "ro", NULL, 0) == 0)
        mount_fd = finish(context, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    int saved = errno;
    close(context);
    errno = saved;
    return mount_fd < 0 ? fail(failure, STEP_LAYER_MOUNT) : mount_fd;
}

int copy_of_mount(int fd, struct failure *failure)
{
    struct statx status;
    struct statfs file_system;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_TYPE, &status) < 0 || fstatfs(fd, &file_system) < 0)
        return fail(failure, STEP_LAYER_MOUNT);
    if (!S_ISDIR(status.stx_mode) || !(status.stx_attributes & STATX_ATTR_MOUNT_ROOT) ||
        file_system.f_type != TMPFS_MAGIC)
        return refuse(failure, EINVAL);
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    return copy < 0 ? fail(failure, STEP_LAYER_MOUNT) : copy;
}

static int map_ids(int mount_fd, int mapping_fd)
{
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)mapping_fd};
    return mount_setattr(mount_fd, "", AT_EMPTY_PATH, &attributes, sizeof attributes);
}

/* Give a directory of ours the owner, mode and times of the one in the layer below, if there is one. */
static int look_like(int writable_fd, const char *ours, int layer_fd, const char *theirs)
{
    struct stat status;
    if (fstatat(layer_fd, theirs, &status, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISDIR(status.st_mode))
        return 0;
    struct timespec times[2] = {status.st_atim, status.st_mtim};
    if (fchownat(writable_fd, ours, status.st_uid, status.st_gid, AT_SYMLINK_NOFOLLOW) < 0 ||
        fchmodat(writable_fd, ours, status.st_mode & 07777, 0) < 0)
        return -1;
    return utimensat(writable_fd, ours, times, AT_SYMLINK_NOFOLLOW);
}

/*
 * The writable layer, made before its ids are mapped, so that its skeleton belongs to root on disk too.
 * Mount points come from here: whatever a layer has at these names, even a symbolic link, is hidden.
 */
static int make_writable(const struct spawner_request *request, int top_layer_fd)
{
    static const struct {
        const char *path;
        mode_t mode;
    } skeleton[] = {{"upper", 0755},     {"work", 0700},     {"shm", 01777},          {"upper/proc", 0555},
                    {"upper/dev", 0755}, {"upper/run", 0755}, {"upper/run/dsec", 0755}, {"upper/sys", 0555},
                    {"upper/tmp", 01777}};
    /* A snapshot has a /tmp, or the mark that it was deleted; the mount points must be ours in any case. */
    const size_t skeleton_count = sizeof skeleton / sizeof *skeleton - (BUILDS_ON_SNAPSHOT(request) ? 1 : 0);
    char number[32];
    int context = fsopen("tmpfs", FSOPEN_CLOEXEC), mount_fd = -1;

    if (context < 0)
        return -1;
    snprintf(number, sizeof number, "%llu", (unsigned long long)request->disk_bytes);
    int made = fsconfig(context, FSCONFIG_SET_STRING, "source", "dsec", 0) == 0 &&
               fsconfig(context, FSCONFIG_SET_STRING, "mode", "0755", 0) == 0 &&
               fsconfig(context, FSCONFIG_SET_STRING, "size", number, 0) == 0;
    snprintf(number, sizeof number, "%llu", (unsigned long long)(request->inodes + SKELETON_INODES + FURNITURE_INODES + device_inodes(request)));
    if (made && fsconfig(context, FSCONFIG_SET_STRING, "nr_inodes", number, 0) == 0)
        mount_fd = finish(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    for (size_t i = 0; mount_fd >= 0 && i < skeleton_count; i++) {
        if (mkdirat(mount_fd, skeleton[i].path, skeleton[i].mode) < 0) {
            int saved = errno;
            close(mount_fd);
            errno = saved;
            mount_fd = -1;
        }
    }
    if (mount_fd >= 0 && BUILDS_ON_SNAPSHOT(request) &&
        (look_like(mount_fd, "upper/run", top_layer_fd, "run") < 0 ||
         look_like(mount_fd, "upper", top_layer_fd, ".") < 0)) {
        int unlike = errno;
        close(mount_fd);
        errno = unlike;
        mount_fd = -1;
    }
    int saved = errno;
    close(context);
    errno = saved;
    return mount_fd;
}

/* Returns the detached clone, which has to stay open until the overlay exists, or -1. */
static int add_layer(int context, int layer_fd, int mapping_fd, struct failure *failure)
{
    int clone_fd = open_tree(layer_fd, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (clone_fd < 0)
        return fail(failure, STEP_LAYER_CLONE);
    int result = 0;
    if (map_ids(clone_fd, mapping_fd) < 0)
        result = fail(failure, STEP_LAYER_ID_MAP);
    else if (fsconfig(context, FSCONFIG_SET_FD, "lowerdir+", NULL, clone_fd) < 0)
        result = fail(failure, STEP_OVERLAY);
    if (result < 0)
        close(clone_fd);
    return result < 0 ? -1 : clone_fd;
}

static int set_directory(int context, const char *key, int writable_fd, const char *path)
{
    int fd = openat(writable_fd, path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int result = fsconfig(context, FSCONFIG_SET_FD, key, NULL, fd);
    int saved = errno;
    close(fd);
    errno = saved;
    return result;
}

static int finish_overlay(int context, int writable_fd)
{
    /* Redirects and metadata-only copies are trusted attributes that a layer could forge. */
    if (fsconfig(context, FSCONFIG_SET_STRING, "source", "dsec", 0) == 0 &&
        set_directory(context, "upperdir", writable_fd, "upper") == 0 &&
        set_directory(context, "workdir", writable_fd, "work") == 0 &&
        fsconfig(context, FSCONFIG_SET_STRING, "redirect_dir", "nofollow", 0) == 0 &&
        fsconfig(context, FSCONFIG_SET_STRING, "metacopy", "off", 0) == 0)
        return finish(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    return -1;
}

static int make_overlay(const struct spawner_request *request, const int *layer_fds, int mapping_fd,
                        const struct sandbox_mounts *mounts, struct failure *failure)
{
    int clones[DSEC_LAYERS_MAX], clone_count = 0, mount_fd = -1;
    int context = fsopen("overlay", FSOPEN_CLOEXEC);

    if (context < 0)
        return fail(failure, STEP_OVERLAY);
    /* The kernel wants the topmost first; ours come lowest first. */
    bool complete = true;
    for (uint32_t i = request->layer_count; complete && i-- > 0;) {
        int clone_fd = add_layer(context, layer_fds[i], mapping_fd, failure);
        complete = clone_fd >= 0;
        if (complete)
            clones[clone_count++] = clone_fd;
    }
    if (complete) {
        mount_fd = finish_overlay(context, mounts->writable_fd);
        if (mount_fd < 0)
            fail(failure, STEP_OVERLAY);
    }
    for (int i = 0; i < clone_count; i++) {
        put_with_furniture(mounts->furniture_fd, clones[i]); /* the overlay has its own by now */
        close(clones[i]);
    }
    close(context);
    return mount_fd;
}

int mount_root(const struct spawner_request *request, const int *layer_fds, int mapping_fd,
               struct sandbox_mounts *mounts, struct failure *failure)
{
    struct mount_attr shared = {.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC};

    mounts->overlay_fd = mounts->shared_fd = mounts->furniture_fd = -1;
    mounts->writable_fd = make_writable(request, layer_fds[request->layer_count - 1]);
    if (mounts->writable_fd < 0 || furnish(mounts->writable_fd, request) < 0 ||
        map_ids(mounts->writable_fd, mapping_fd) < 0) {
        fail(failure, STEP_WRITABLE_LAYER);
        goto undo;
    }
    mounts->furniture_fd = clone_furniture(mounts->writable_fd);
    if (mounts->furniture_fd < 0) {
        fail(failure, STEP_DEV_MOUNT);
        goto undo;
    }
    mounts->shared_fd = open_tree(mounts->writable_fd, "shm", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (mounts->shared_fd < 0 ||
        mount_setattr(mounts->shared_fd, "", AT_EMPTY_PATH, &shared, sizeof shared) < 0) {
        fail(failure, STEP_SHM_MOUNT);
        goto undo;
    }
    mounts->overlay_fd = make_overlay(request, layer_fds, mapping_fd, mounts, failure);
    if (mounts->overlay_fd >= 0)
        return 0;
undo:
    close_if_open(mounts->shared_fd);
    close_if_open(mounts->furniture_fd);
    close_if_open(mounts->writable_fd);
    mounts->shared_fd = mounts->furniture_fd = mounts->writable_fd = -1;
    return -1;
}

/* Give a mount the ids of a sandbox; it is closed when that fails. */
static int mapped(int mount_fd, int mapping_fd)
{
    if (mount_fd >= 0 && map_ids(mount_fd, mapping_fd) < 0) {
        int saved = errno;
        close(mount_fd);
        errno = saved;
        return -1;
    }
    return mount_fd;
}

int clone_layer(int layer_fd, int mapping_fd)
{
    return mapped(open_tree(layer_fd, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC), mapping_fd);
}

int make_volume(uint64_t bytes, uint64_t inodes, int mapping_fd)
{
    char number[32];
    int context = fsopen("tmpfs", FSOPEN_CLOEXEC), mount_fd = -1;

    if (context < 0)
        return -1;
    snprintf(number, sizeof number, "%llu", (unsigned long long)bytes);
    int made = fsconfig(context, FSCONFIG_SET_STRING, "source", "dsec-volume", 0) == 0 &&
               fsconfig(context, FSCONFIG_SET_STRING, "mode", "1777", 0) == 0 &&
               fsconfig(context, FSCONFIG_SET_STRING, "size", number, 0) == 0;
    snprintf(number, sizeof number, "%llu", (unsigned long long)inodes);
    if (made && fsconfig(context, FSCONFIG_SET_STRING, "nr_inodes", number, 0) == 0)
        mount_fd = finish(context, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    int saved = errno;
    close(context);
    errno = saved;
    return mapped(mount_fd, mapping_fd);
}
