/*
 * One file from outside. It has no name until all of it is there and verified: whatever ends the upload
 * before (the daemon, the sandbox, this process), nothing of it is left behind. What it replaces keeps its
 * owner and mode, but not its other names: those still lead to the old content.
 */
#include "file_work.h"

#include <limits.h>
#include <stdio.h>
#include <time.h>

#define LINKS_MAX 40 /* as the kernel's own */

static int link_here(int fd, int directory_fd, const char *name)
{
    char path[64];
    if (linkat(fd, "", directory_fd, name, AT_EMPTY_PATH) == 0)
        return 0;
    if (errno != ENOENT)
        return -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd); /* before Linux 6.10 */
    return linkat(AT_FDCWD, path, directory_fd, name, AT_SYMLINK_FOLLOW);
}

/* Give the nameless file its name, in the place of what has it. */
static int take_place(int fd, int directory_fd, const char *name)
{
    struct timespec now;
    char temporary[64];

    if (link_here(fd, directory_fd, name) == 0)
        return 0;
    if (errno != EEXIST)
        return -1;
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(temporary, sizeof temporary, ".dsec-put-%d-%lld", getpid(), now.tv_sec * 1000000000LL + now.tv_nsec);
    if (link_here(fd, directory_fd, temporary) < 0)
        return -1;
    if (renameat(directory_fd, temporary, directory_fd, name) == 0)
        return 0;
    int error = errno;
    unlinkat(directory_fd, temporary, 0);
    errno = error;
    return -1;
}

/* Put in path what the link at its end says; directory is how much of path leads to the link. Returns 0, or -1. */
static int read_link(int directory_fd, const char *name, char *path, size_t directory)
{
    char target[PATH_MAX];
    /* Whether this user may follow it at all, the kernel says (protected_symlinks, loops). */
    int probe = open(path, O_PATH | O_CLOEXEC);
    if (probe < 0 && errno != ENOENT)
        return -1;
    close(probe);
    ssize_t size = readlinkat(directory_fd, name, target, sizeof target);
    if (size <= 0)
        return -1;
    size_t kept = target[0] == '/' ? 0 : directory;
    if (kept + (size_t)size >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(path + kept, target, (size_t)size);
    path[kept + (size_t)size] = 0;
    return 0;
}

/*
 * Open the directory that the file goes into, and point name at its name there. A link in its place is followed
 * as open(2) does, also one that leads to nothing yet. Returns -1 with errno.
 */
static int open_place(char *path, char **name, struct stat *existing)
{
    for (int links = 0; links < LINKS_MAX; links++) {
        if (path[strlen(path) - 1] == '/') {
            errno = EISDIR;
            return -1;
        }
        int directory_fd = file_open_parent(path, name);
        if (directory_fd < 0)
            return -1;
        if (fstatat(directory_fd, *name, existing, AT_SYMLINK_NOFOLLOW) < 0) {
            existing->st_mode = 0;
            if (errno == ENOENT)
                return directory_fd;
        } else if (!S_ISLNK(existing->st_mode)) {
            return directory_fd;
        } else if (read_link(directory_fd, *name, path, (size_t)(*name - path)) == 0) {
            close(directory_fd);
            continue;
        }
        int error = errno;
        close(directory_fd);
        errno = error;
        return -1;
    }
    errno = ELOOP;
    return -1;
}

/* Give the new file the owner, and unless it is to change the mode, of what it replaces. Returns 0, or -1. */
static int take_attributes(int fd, int directory_fd, const char *name, const struct put_commit *commit)
{
    struct stat old;
    mode_t mode = commit->mode & 07777;
    if (fstatat(directory_fd, name, &old, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(old.st_mode)) {
        /* Set-id bits do not outlive a change of the content. */
        if (!(commit->mode & PUT_CHANGE_MODE))
            mode = old.st_mode & 0777;
        /* Who may not give files away owns what he puts in their place, as always. */
        if (fchown(fd, old.st_uid, old.st_gid) < 0 && fchown(fd, (uid_t)-1, old.st_gid) < 0 && errno != EPERM)
            return -1;
    }
    return fchmod(fd, mode);
}

_Noreturn void file_put(const struct request_view *request, struct outcome *outcome)
{
    struct stat status;
    struct put_commit commit;
    char path[PATH_MAX], *name;
    size_t size = strlen(request->path);

    if (size >= sizeof path)
        file_refuse(request, STEP_FILE_PUT, ENAMETOOLONG, outcome);
    memcpy(path, request->path, size + 1);
    int directory_fd = open_place(path, &name, &status);
    if (directory_fd < 0 && errno == ENOENT && request->header->mode & FILE_MODE_PARENTS) {
        /* Above the path that was named: a link that leads nowhere makes no directories elsewhere. */
        char *slash = strrchr(memcpy(path, request->path, size + 1), '/');
        *slash = 0;
        if (file_make_directory(path, 0755, true) < 0)
            file_refuse(request, STEP_FILE_MKDIR, errno, outcome);
        *slash = '/';
        directory_fd = open_place(path, &name, &status);
    }
    if (directory_fd < 0)
        file_refuse(request, errno == EISDIR ? STEP_FILE_KIND : STEP_FILE_PUT, errno == EBUSY ? EISDIR : errno,
                    outcome);
    if (S_ISDIR(status.st_mode))
        file_refuse(request, STEP_FILE_KIND, EISDIR, outcome);
    if (status.st_mode && !S_ISREG(status.st_mode))
        file_refuse(request, STEP_FILE_KIND, EINVAL, outcome);
    int fd = openat(directory_fd, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0)
        file_refuse(request, STEP_FILE_PUT, errno == EOPNOTSUPP ? EACCES : errno, outcome);
    if (fstat(fd, &status) < 0 || !file_is_storage(fd, &status))
        file_refuse(request, STEP_FILE_KIND, EINVAL, outcome);
    int stream_fd = file_answer_stream(request, STEP_FILE_PUT, fd, outcome);
    if (stream_read(stream_fd, &commit, sizeof commit) != 1)
        _exit(0);
    struct file_result result = {.step = STEP_FILE_PUT, .entries = 1};
    if (take_attributes(fd, directory_fd, name, &commit) < 0 || take_place(fd, directory_fd, name) < 0)
        result.error = errno;
    stream_finish(stream_fd, result, NULL);
}
