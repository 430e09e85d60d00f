/*
 * File operations, each in a forked child that has taken its user's identity: the sandbox's own permissions
 * decide, and a path that blocks (a lease, a slow directory) holds up nobody else.
 */
#include "pid1.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <linux/magic.h>
#include <stdio.h>

static _Noreturn void answer(const struct request_view *request, struct control_reply *reply, int fd,
                             struct outcome *outcome)
{
    reply->kind = CONTROL_FILE_DONE;
    reply->id = request->header->id;
    if (packet_send(DSEC_CONTROL_FD, reply, sizeof *reply, &fd, fd >= 0 ? 1 : 0, 0) == 0)
        outcome->step = STEP_COUNT; /* answered */
    _exit(0);
}

static _Noreturn void refuse(const struct request_view *request, enum dsec_step step, int error,
                             struct outcome *outcome)
{
    struct control_reply reply = {.error = error ? error : EIO, .step = step};
    answer(request, &reply, -1, outcome);
}

static void describe(const struct stat *status, struct control_reply *reply)
{
    reply->file_mode = status->st_mode;
    reply->user_id = status->st_uid;
    reply->group_id = status->st_gid;
    reply->size_bytes = (uint64_t)status->st_size;
    reply->modified_ns = status->st_mtim.tv_sec * 1000000000LL + status->st_mtim.tv_nsec;
}

/*
 * The sandbox's own layer, its tmpfs mounts, and the run directory, wherever that lives. Files of /proc look
 * regular too, but reading them may block, and namespaces of the kernel are among them.
 */
static bool is_storage(int fd, const struct stat *status)
{
    struct statfs file_system;
    struct stat run;
    if (fstatfs(fd, &file_system) < 0)
        return false;
    if (file_system.f_type == OVERLAYFS_SUPER_MAGIC || file_system.f_type == TMPFS_MAGIC)
        return true;
    return stat("/run/dsec", &run) == 0 && run.st_dev == status->st_dev;
}

/* Only a regular file leaves the sandbox. */
static int open_regular(const struct request_view *request, struct control_reply *reply, struct outcome *outcome)
{
    static const int flags_of[] = {[FILE_OPEN_READ] = O_RDONLY,
                                   [FILE_OPEN_WRITE] = O_WRONLY | O_CREAT | O_TRUNC,
                                   [FILE_OPEN_APPEND] = O_WRONLY | O_CREAT | O_APPEND,
                                   [FILE_OPEN_CREATE] = O_WRONLY | O_CREAT | O_EXCL};
    struct stat status;
    int flags = flags_of[request->header->operation] | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    int fd = open(request->path, flags, request->header->mode & 07777);

    if (fd < 0)
        refuse(request, STEP_FILE_OPEN, errno, outcome);
    if (fstat(fd, &status) < 0)
        refuse(request, STEP_FILE_OPEN, errno, outcome);
    if (S_ISDIR(status.st_mode))
        refuse(request, STEP_FILE_KIND, EISDIR, outcome);
    if (!S_ISREG(status.st_mode) || !is_storage(fd, &status))
        refuse(request, STEP_FILE_KIND, EINVAL, outcome);
    describe(&status, reply);
    return fd;
}

static char kind_letter(int directory_fd, const struct dirent *entry)
{
    struct stat status;
    switch (entry->d_type) {
    case DT_REG:
        return 'f';
    case DT_DIR:
        return 'd';
    case DT_LNK:
        return 'l';
    case DT_UNKNOWN:
        if (fstatat(directory_fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0)
            return S_ISREG(status.st_mode) ? 'f' : S_ISDIR(status.st_mode) ? 'd' : S_ISLNK(status.st_mode) ? 'l' : 'o';
        return 'o';
    default:
        return 'o';
    }
}

/* Names go into a memfd: a letter for the kind, the name, NUL. */
static int list_names(const struct request_view *request, struct control_reply *reply, struct outcome *outcome)
{
    DIR *directory = opendir(request->path);
    if (!directory)
        refuse(request, STEP_FILE_LIST, errno, outcome);
    int names = memfd_create("names", MFD_CLOEXEC);
    FILE *stream = names < 0 ? NULL : fdopen(dup(names), "w");
    if (!stream)
        refuse(request, STEP_FILE_LIST, errno, outcome);
    struct dirent *entry;
    uint32_t count = 0;
    while (count < DSEC_LIST_NAMES_MAX && (entry = readdir(directory))) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        fprintf(stream, "%c%s%c", kind_letter(dirfd(directory), entry), entry->d_name, 0);
        count++;
    }
    if (fclose(stream) != 0)
        refuse(request, STEP_FILE_LIST, errno, outcome);
    reply->size_bytes = count;
    return names;
}

static int make_directory(char *path, mode_t mode, bool parents)
{
    struct stat status;
    int denied = 0;
    for (char *slash = path + 1; parents && (slash = strchr(slash, '/')); slash++) {
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

static int remove_path(const char *path)
{
    if (unlink(path) == 0)
        return 0;
    return errno == EISDIR ? rmdir(path) : -1;
}

_Noreturn void file_child(const struct request_view *request, struct outcome *outcome)
{
    struct control_reply reply = {0};
    struct identity identity;
    struct stat status;
    int fd = -1, error;

    /* A path may name a descriptor by /proc/self/fd: there is none but the control socket. */
    if (sys_close_range(DSEC_CONTROL_FD + 1, ~0U, 0) < 0)
        refuse(request, STEP_FILE_FORK, errno, outcome);
    error = resolve_user(request->user, &identity);
    if (!error)
        error = assume_identity(&identity);
    if (error)
        refuse(request, STEP_FILE_USER, error, outcome);
    if (request->path[0] != '/' || (request->target && request->target[0] != '/'))
        refuse(request, STEP_PROTOCOL, EINVAL, outcome);
    umask(0);
    switch (request->header->operation) {
    case FILE_OPEN_READ:
    case FILE_OPEN_WRITE:
    case FILE_OPEN_APPEND:
    case FILE_OPEN_CREATE:
        fd = open_regular(request, &reply, outcome);
        break;
    case FILE_STAT:
        if (lstat(request->path, &status) < 0)
            refuse(request, STEP_FILE_STAT, errno, outcome);
        describe(&status, &reply);
        break;
    case FILE_LIST:
        fd = list_names(request, &reply, outcome);
        break;
    case FILE_MKDIR:
    case FILE_MKDIR_PARENTS:
        if (make_directory(request->path, request->header->mode & 07777,
                           request->header->operation == FILE_MKDIR_PARENTS) < 0)
            refuse(request, STEP_FILE_MKDIR, errno, outcome);
        break;
    case FILE_RENAME:
        if (!request->target)
            refuse(request, STEP_PROTOCOL, EINVAL, outcome);
        if (rename(request->path, request->target) < 0)
            refuse(request, STEP_FILE_RENAME, errno, outcome);
        break;
    case FILE_UNLINK:
        if (remove_path(request->path) < 0)
            refuse(request, STEP_FILE_UNLINK, errno, outcome);
        break;
    default:
        refuse(request, STEP_PROTOCOL, EINVAL, outcome);
    }
    answer(request, &reply, fd, outcome);
}
