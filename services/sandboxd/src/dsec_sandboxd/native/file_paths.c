/* Paths of file operations: what they lead to is decided by descriptors, so that no race can change it. */
#include "file_work.h"

#include <linux/magic.h>
#include <linux/openat2.h>
#include <sys/vfs.h>

bool file_is_storage(int fd, const struct stat *status)
{
    struct statfs file_system;
    struct stat run;
    if (fstatfs(fd, &file_system) < 0)
        return false;
    if (file_system.f_type == OVERLAYFS_SUPER_MAGIC || file_system.f_type == TMPFS_MAGIC)
        return true;
    return stat("/run/dsec", &run) == 0 && run.st_dev == status->st_dev;
}

int file_make_directory(char *path, mode_t mode, bool parents)
{
    struct stat status;
    int denied = 0;
    for (char *slash = path + 1; parents && *path && (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        int result = mkdir(path, 0755);
        *slash = '/';
        if (result < 0 && errno != EEXIST && errno != EROFS && errno != EACCES)
            return -1;
        if (result < 0 && errno != EEXIST)
            denied = errno;
    }
    if (mkdir(path, mode) == 0)
        return 0;
    /* A parent that could not be made is why the last one has none. */
    if (errno == ENOENT && denied)
        errno = denied;
    if (parents && errno == EEXIST) {
        if (stat(path, &status) == 0 && S_ISDIR(status.st_mode))
            return 0;
        errno = EEXIST;
    }
    return -1;
}

int file_open_parent(char *path, char **name)
{
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/')
        path[--size] = 0;
    char *slash = strrchr(path, '/');
    *name = slash + 1;
    if (!**name || strcmp(*name, ".") == 0 || strcmp(*name, "..") == 0) {
        errno = EBUSY;
        return -1;
    }
    if (slash == path)
        return open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    *slash = 0;
    int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    int error = errno;
    *slash = '/';
    errno = error;
    return fd;
}

int file_open_below(int root_fd, const char *path, int flags)
{
    struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC),
                           .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS |
                                      RESOLVE_NO_XDEV};
    return (int)syscall(SYS_openat2, root_fd, *path ? path : ".", &how, sizeof how);
}
