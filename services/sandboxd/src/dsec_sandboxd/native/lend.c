/*
 * What a living sandbox is lent for a while. Devices come into its /dev by the host's side of that, and go by it; a
 * mount is put into its run directory by a helper in its mount namespace, and goes when the daemon removes the
 * directory that it is on.
 *
 * Root inside may move what lies above the run directory, or put a link in its place: no link is followed, and what a
 * mount is put on has to be the very directory that the daemon made for it.
 */
#include "spawner.h"

#include <sys/stat.h>
#include <linux/openat2.h>

struct lent {
    const char *path;
    int mount_fd;
    struct stat place;
};

static int open_place(const char *path)
{
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC,
                           .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

/* By a helper that ends then: its descriptors need no closing. */
static int put(const struct lent *lent)
{
    struct stat found;
    int place = open_place(lent->path);

    if (place < 0 || fstat(place, &found) < 0)
        return -1;
    if (found.st_dev != lent->place.st_dev || found.st_ino != lent->place.st_ino) {
        errno = ESTALE;
        return -1;
    }
    return move_mount(lent->mount_fd, "", place, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
}

/* The helper has our memory and a working directory of its own, without which it could not enter. */
static int put_inside(int pidfd, const struct lent *lent)
{
    volatile int error = ECHILD; /* of a helper that was killed */
    pid_t pid = vfork();

    if (pid == 0) {
        error = setns(pidfd, CLONE_NEWNS) < 0 || put(lent) < 0 ? errno : 0;
        _exit(0);
    }
    if (pid < 0)
        return -1;
    errno = error;
    return error ? -1 : 0;
}

static int make_mount(const struct spawner_request *request, const struct slot *slot, int layer_fd, int given_fd)
{
    if (request->flags == LEND_LAYER)
        return clone_layer(layer_fd, slot->mapping_fd);
    if (request->flags == LEND_VOLUME)
        return make_volume(request->disk_bytes, request->inodes, slot->mapping_fd);
    return fcntl(given_fd, F_DUPFD_CLOEXEC, 3);
}

static const char *path_of(const struct spawner_request *request)
{
    const char *at = request->settings + 1, *end = request->settings + request->settings_bytes;
    return request->settings_bytes && *request->settings == DSEC_SETTING_PATH ? take_text(&at, end) : NULL;
}

int lend_to(const struct spawner_request *request, const struct slot *slot, int layer_fd, const int *fds, int count,
            struct failure *failure)
{
    uint32_t what = request->flags;
    bool is_bounded = request->disk_bytes && request->inodes;

    if (request->settings_bytes > sizeof request->settings)
        return refuse(failure, EINVAL);
    if (what == LEND_DEVICES || what == TAKE_DEVICES) {
        if (change_devices(slot->writable_fd, request, what == TAKE_DEVICES) < 0)
            return fail(failure, STEP_DEV_MOUNT);
        return 0;
    }
    struct lent lent = {.path = path_of(request), .mount_fd = -1};
    if (!lent.path || count != (what == LEND_GIVEN ? 3 : 2) ||
        !(what == LEND_GIVEN || what == LEND_LAYER || (what == LEND_VOLUME && is_bounded)))
        return refuse(failure, EINVAL);
    if (what == LEND_LAYER && !layer_fd)
        return refuse(failure, ENOENT);
    if (fstat(fds[1], &lent.place) < 0)
        return fail(failure, STEP_RUN_MOUNT);
    lent.mount_fd = make_mount(request, slot, layer_fd, fds[count - 1]);
    if (lent.mount_fd < 0)
        return fail(failure, STEP_RUN_MOUNT);
    int result = put_inside(fds[0], &lent);
    if (result < 0)
        fail(failure, STEP_RUN_MOUNT);
    close(lent.mount_fd);
    return result;
}
