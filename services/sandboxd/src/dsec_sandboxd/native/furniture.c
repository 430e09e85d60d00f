/*
 * What every sandbox has beside its root: its devices, and two empty things to mask with. Each sandbox has its own,
 * in its writable layer: were they shared, a watch (inotify) on /dev/null would tell of every opening of it on the
 * node, and a lock on it would be seen by all.
 */
#include "spawner.h"

#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

static const struct {
    const char *path;
    mode_t mode;
} directories[] = {{"furniture", 0755},         {"furniture/dev", 0755},   {"furniture/dev/pts", 0755},
                   {"furniture/dev/shm", 0755}, {"furniture/masks", 0755}, {"furniture/masks/directory", 0555},
                   {"furniture/done", 0700}};

static const struct {
    const char *path;
    unsigned major, minor;
} nodes[] = {{"furniture/dev/null", 1, 3},   {"furniture/dev/zero", 1, 5},    {"furniture/dev/full", 1, 7},
             {"furniture/dev/random", 1, 8}, {"furniture/dev/urandom", 1, 9}, {"furniture/dev/tty", 5, 0}};

static const struct {
    const char *target, *path;
} links[] = {{"/proc/self/fd", "furniture/dev/fd"},
             {"/proc/self/fd/0", "furniture/dev/stdin"},
             {"/proc/self/fd/1", "furniture/dev/stdout"},
             {"/proc/self/fd/2", "furniture/dev/stderr"},
             {"pts/ptmx", "furniture/dev/ptmx"}};

/* A device that this sandbox alone has, such as a GPU; its name may lie in one directory below. */
static int add_device(int directory_fd, const char *name, const char *numbers)
{
    char directory[64];
    const char *slash = strchr(name, '/');
    unsigned major, minor;

    if (!*name || strstr(name, "..") || sscanf(numbers, "%u:%u", &major, &minor) != 2 ||
        (slash && (size_t)(slash - name) >= sizeof directory)) {
        errno = EINVAL;
        return -1;
    }
    if (slash) {
        snprintf(directory, sizeof directory, "%.*s", (int)(slash - name), name);
        if (mkdirat(directory_fd, directory, 0755) < 0 && errno != EEXIST)
            return -1;
    }
    if (mknodat(directory_fd, name, S_IFCHR | 0666, makedev(major, minor)) == 0)
        return 0;
    /* Lent again after a daemon died on the way? */
    struct stat status;
    if (errno == EEXIST && fstatat(directory_fd, name, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISCHR(status.st_mode) &&
        status.st_rdev == makedev(major, minor))
        return 0;
    return -1;
}

/* Its directory goes with the last device in it. */
static int remove_device(int directory_fd, const char *name)
{
    char directory[64];
    const char *slash = strchr(name, '/');

    if (unlinkat(directory_fd, name, 0) < 0 && errno != ENOENT)
        return -1;
    if (slash && (size_t)(slash - name) < sizeof directory) {
        snprintf(directory, sizeof directory, "%.*s", (int)(slash - name), name);
        (void)unlinkat(directory_fd, directory, AT_REMOVEDIR);
    }
    return 0;
}

int change_devices(int writable_fd, const struct spawner_request *request, bool remove)
{
    const char *at = request->settings, *end = at + request->settings_bytes;
    int result = 0, directory_fd = -1;

    while (result == 0 && at < end) {
        int kind = *at++;
        const char *name = take_text(&at, end), *numbers = take_text(&at, end);
        if (kind != DSEC_SETTING_DEVICE || !name || !numbers)
            continue;
        if (directory_fd < 0)
            directory_fd = openat(writable_fd, "furniture/dev", O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (directory_fd < 0)
            result = -1;
        else
            result = remove ? remove_device(directory_fd, name) : add_device(directory_fd, name, numbers);
    }
    int saved = errno;
    close_if_open(directory_fd);
    errno = saved;
    return result;
}

int furnish(int writable_fd, const struct spawner_request *request)
{
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
        if (mkdirat(writable_fd, directories[i].path, directories[i].mode) < 0)
            return -1;
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++)
        if (mknodat(writable_fd, nodes[i].path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) < 0)
            return -1;
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlinkat(links[i].target, writable_fd, links[i].path) < 0)
            return -1;
    if (mknodat(writable_fd, "furniture/masks/file", S_IFREG | 0444, 0) < 0)
        return -1;
    return change_devices(writable_fd, request, false);
}

int clone_furniture(int writable_fd)
{
    /* Read-only, which does not hinder writing to the devices. */
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC,
                                    .attr_clr = MOUNT_ATTR_NODEV};
    int furniture_fd = open_tree(writable_fd, "furniture", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (furniture_fd >= 0 && mount_setattr(furniture_fd, "", AT_EMPTY_PATH, &attributes, sizeof attributes) < 0) {
        int saved = errno;
        close(furniture_fd);
        errno = saved;
        return -1;
    }
    return furniture_fd;
}

void put_with_furniture(int furniture_fd, int mount_fd)
{
    /* Before Linux 6.15 nothing can be mounted in what is detached itself: then the caller's close waits. */
    (void)move_mount(mount_fd, "", furniture_fd, "done", MOVE_MOUNT_F_EMPTY_PATH);
}
