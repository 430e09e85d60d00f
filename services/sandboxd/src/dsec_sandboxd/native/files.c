/*
 * File operations, each in a forked child that has taken its user's identity: the sandbox's own permissions
 * decide, and a path that blocks (a lease, a slow directory) holds up nobody else.
 */
#include "file_work.h"

#include <stdio.h>
#include <sys/mman.h>

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif

_Noreturn void file_answer(const struct request_view *request, struct control_reply *reply, int fd,
                           struct outcome *outcome)
{
    reply->kind = CONTROL_FILE_DONE;
    reply->id = request->header->id;
    if (packet_send(DSEC_CONTROL_FD, reply, sizeof *reply, &fd, fd >= 0 ? 1 : 0, 0) == 0)
        outcome->step = STEP_COUNT; /* answered */
    _exit(0);
}

_Noreturn void file_refuse(const struct request_view *request, enum dsec_step step, int error,
                           struct outcome *outcome)
{
    struct control_reply reply = {.error = error ? error : EIO, .step = step};
    file_answer(request, &reply, -1, outcome);
}

static void describe(const struct stat *status, struct control_reply *reply)
{
    reply->file_mode = status->st_mode;
    reply->user_id = status->st_uid;
    reply->group_id = status->st_gid;
    reply->size_bytes = (uint64_t)status->st_size;
    reply->modified_ns = status->st_mtim.tv_sec * 1000000000LL + status->st_mtim.tv_nsec;
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
        file_refuse(request, STEP_FILE_OPEN, errno, outcome);
    if (fstat(fd, &status) < 0)
        file_refuse(request, STEP_FILE_OPEN, errno, outcome);
    if (S_ISDIR(status.st_mode))
        file_refuse(request, STEP_FILE_KIND, EISDIR, outcome);
    if (!S_ISREG(status.st_mode) || !file_is_storage(fd, &status))
        file_refuse(request, STEP_FILE_KIND, EINVAL, outcome);
    describe(&status, reply);
    return fd;
}

/* What a link leads to goes beside the answer. */
static int read_link(const struct request_view *request, struct outcome *outcome)
{
    char target[4096];
    ssize_t size = readlink(request->path, target, sizeof target);
    int fd = size < 0 ? -1 : memfd_create("target", MFD_CLOEXEC);
    if (fd < 0 || write(fd, target, (size_t)size) != size)
        file_refuse(request, STEP_FILE_STAT, errno, outcome);
    return fd;
}

static int remove_path(const char *path)
{
    if (unlink(path) == 0)
        return 0;
    return errno == EISDIR ? rmdir(path) : -1;
}

bool file_takes_target(uint32_t operation)
{
    return operation == FILE_RENAME || operation == FILE_LIST || operation == FILE_COPY;
}

_Noreturn void file_child(const struct request_view *request, struct outcome *outcome)
{
    struct control_reply reply = {0};
    struct identity identity;
    struct stat status;
    int fd = -1, error;

    /* A path may name a descriptor by /proc/self/fd: there is none but the control socket. */
    if (sys_close_range(DSEC_CONTROL_FD + 1, ~0U, 0) < 0)
        file_refuse(request, STEP_FILE_FORK, errno, outcome);
    error = resolve_user(request->user, &identity);
    if (!error)
        error = assume_identity(&identity);
    if (error)
        file_refuse(request, STEP_FILE_USER, error, outcome);
    if (request->path[0] != '/' || (request->header->operation == FILE_RENAME && request->target[0] != '/'))
        file_refuse(request, STEP_PROTOCOL, EINVAL, outcome);
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
            file_refuse(request, STEP_FILE_STAT, errno, outcome);
        describe(&status, &reply);
        if (S_ISLNK(status.st_mode))
            fd = read_link(request, outcome);
        break;
    case FILE_LIST:
        file_list(request, outcome);
    case FILE_PUT:
        file_put(request, outcome);
    case FILE_REMOVE:
        file_remove(request, outcome);
    case FILE_UNPACK:
        file_unpack(request, outcome);
    case FILE_PACK:
        file_pack(request, outcome);
    case FILE_WATCH:
        file_watch(request, outcome);
    case FILE_COPY:
        file_copy(request, outcome);
    case FILE_MKDIR:
    case FILE_MKDIR_PARENTS:
        if (file_make_directory(request->path, request->header->mode & 07777,
                           request->header->operation == FILE_MKDIR_PARENTS) < 0)
            file_refuse(request, STEP_FILE_MKDIR, errno, outcome);
        break;
    case FILE_RENAME:
        if (syscall(SYS_renameat2, AT_FDCWD, request->path, AT_FDCWD, request->target,
                    request->header->mode & FILE_MODE_KEEP ? RENAME_NOREPLACE : 0) < 0)
            file_refuse(request, STEP_FILE_RENAME, errno, outcome);
        break;
    case FILE_UNLINK:
        if (remove_path(request->path) < 0)
            file_refuse(request, STEP_FILE_UNLINK, errno, outcome);
        break;
    default:
        file_refuse(request, STEP_PROTOCOL, EINVAL, outcome);
    }
    file_answer(request, &reply, fd, outcome);
}
