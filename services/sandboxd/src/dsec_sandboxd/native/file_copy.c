/*
 * Copy a file or a tree to a new name, below which nothing was before. No link is followed and no other mount is
 * entered; what is made is opened by descriptors, so that nobody can put a link in its place. Modes, owners (where
 * the user may give them), times, hard links, holes and user attributes are kept; a socket becomes a dead one, as
 * everywhere.
 */
#include "file_work.h"

#include <dirent.h>
#include <stdlib.h>
#include <sys/xattr.h>
#include <time.h>

#define DEPTH_MAX 256
#define PATH_BYTES_MAX 4096
#define PIECE_BYTES (256 * 1024)
#define HOLE_BYTES 4096
#define BEAT_S 1 /* the daemon hears from us so often; it may have let go of us */

/* A file with other names, by what it is, and where its copy is below the first copy's parent. */
struct linked {
    dev_t device;
    ino_t inode;
    char *path;
};

struct copying {
    int stream_fd;
    int root_fd;          /* the directory that the copy is made in */
    struct stat root;     /* the copy's own topmost directory: it is not copied into itself */
    bool has_root;
    time_t beat_s;
    struct linked *links; /* open addressing; capacity is a power of two */
    size_t link_count, link_capacity;
    struct file_result result;
    char path[PATH_BYTES_MAX]; /* of the entry at work, below root_fd */
    char piece[PIECE_BYTES];
};

static _Noreturn void fail(struct copying *work, int error)
{
    work->result.error = error ? error : EIO;
    work->result.step = STEP_FILE_COPY;
    stream_finish(work->stream_fd, work->result, NULL);
}

static void beat(struct copying *work)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec - work->beat_s < BEAT_S)
        return;
    work->beat_s = now.tv_sec;
    stream_frame(work->stream_fd, NULL, 0, "", 1);
}

/* ---- hard links ---- */

static struct linked *place_of(struct linked *links, size_t capacity, const struct stat *status)
{
    size_t at = (size_t)(status->st_ino * 0x9E3779B97F4A7C15ULL ^ status->st_dev);
    for (;; at++) {
        struct linked *link = &links[at & (capacity - 1)];
        if (!link->path || (link->inode == status->st_ino && link->device == status->st_dev))
            return link;
    }
}

static void remember(struct copying *work, const struct stat *status)
{
    if (2 * (work->link_count + 1) > work->link_capacity) {
        size_t capacity = work->link_capacity ? 2 * work->link_capacity : 1024;
        struct linked *links = calloc(capacity, sizeof *links);
        if (!links)
            fail(work, ENOMEM);
        for (size_t i = 0; i < work->link_capacity; i++) {
            struct stat old = {.st_dev = work->links[i].device, .st_ino = work->links[i].inode};
            if (work->links[i].path)
                *place_of(links, capacity, &old) = work->links[i];
        }
        free(work->links);
        work->links = links;
        work->link_capacity = capacity;
    }
    struct linked *link = place_of(work->links, work->link_capacity, status);
    *link = (struct linked){.device = status->st_dev, .inode = status->st_ino, .path = strdup(work->path)};
    if (!link->path)
        fail(work, ENOMEM);
    work->link_count++;
}

/* Whether this name became a link to the copy of an earlier one. */
static bool linked_before(struct copying *work, int to_fd, const char *name, const struct stat *status)
{
    if (status->st_nlink < 2 || !work->link_capacity)
        return false;
    struct linked *link = place_of(work->links, work->link_capacity, status);
    return link->path && linkat(work->root_fd, link->path, to_fd, name, 0) == 0;
}

/* ---- one entry ---- */

static void copy_xattrs(int from_fd, int to_fd)
{
    static char names[65536], value[65536];
    ssize_t size = flistxattr(from_fd, names, sizeof names);
    for (ssize_t at = 0; at < size; at += (ssize_t)strlen(names + at) + 1) {
        if (strncmp(names + at, "user.", 5) != 0 && strncmp(names + at, "system.posix_acl_", 17) != 0)
            continue;
        ssize_t got = fgetxattr(from_fd, names + at, value, sizeof value);
        if (got >= 0)
            fsetxattr(to_fd, names + at, value, (size_t)got, 0); /* as cp does: as far as they are taken */
    }
}

/* Owner before mode: a change of owner takes set-id bits away. */
static void finish_open(struct copying *work, int from_fd, int to_fd, const struct stat *status)
{
    struct timespec times[2] = {status->st_atim, status->st_mtim};
    mode_t mode = status->st_mode & 07777;
    if (fchown(to_fd, status->st_uid, status->st_gid) < 0)
        mode &= 01777; /* set-id bits of somebody else's file would be the user's own */
    if (fchmod(to_fd, mode) < 0)
        fail(work, errno);
    copy_xattrs(from_fd, to_fd);
    if (futimens(to_fd, times) < 0)
        fail(work, errno);
}

static bool is_zero(const char *data, size_t size)
{
    return size == 0 || (data[0] == 0 && memcmp(data, data + 1, size - 1) == 0);
}

static void write_piece(struct copying *work, int to_fd, size_t size)
{
    for (size_t at = 0; at < size;) {
        size_t now = size - at < HOLE_BYTES ? size - at : HOLE_BYTES;
        if (is_zero(work->piece + at, now)) {
            if (lseek(to_fd, (off_t)now, SEEK_CUR) < 0)
                fail(work, errno);
            at += now;
            continue;
        }
        size_t end = at + now;
        while (end < size && !is_zero(work->piece + end, size - end < HOLE_BYTES ? size - end : HOLE_BYTES))
            end += size - end < HOLE_BYTES ? size - end : HOLE_BYTES;
        while (at < end) {
            ssize_t done = write(to_fd, work->piece + at, end - at);
            if (done < 0)
                fail(work, errno);
            at += (size_t)done;
        }
    }
}

static void copy_file(struct copying *work, int from_fd, int to_fd, const char *name, const struct stat *status)
{
    uint64_t total = 0;
    ssize_t got;
    int fd = openat(to_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        fail(work, errno);
    /* Holes are not read: a file of a terabyte without content costs nothing. */
    off_t data = 0;
    while ((data = lseek(from_fd, data, SEEK_DATA)) >= 0) {
        off_t end = lseek(from_fd, data, SEEK_HOLE);
        if (end < 0 || lseek(from_fd, data, SEEK_SET) < 0 || lseek(fd, data, SEEK_SET) < 0)
            fail(work, errno);
        while (data < end) {
            size_t want = end - data < PIECE_BYTES ? (size_t)(end - data) : PIECE_BYTES;
            got = read(from_fd, work->piece, want);
            if (got < 0)
                fail(work, errno);
            if (got == 0)
                break; /* it became shorter */
            write_piece(work, fd, (size_t)got);
            data += got;
            total += (uint64_t)got;
            beat(work);
        }
        if (data < end)
            break;
    }
    off_t size = data < 0 && errno == ENXIO ? status->st_size : data;
    if (ftruncate(fd, size) < 0)
        fail(work, errno);
    finish_open(work, from_fd, fd, status);
    work->result.bytes += total;
    close(fd);
}

static void copy_other(struct copying *work, int from_fd, int to_fd, const char *name, const char *new_name,
                       const struct stat *status)
{
    struct timespec times[2] = {status->st_atim, status->st_mtim};
    char target[PATH_BYTES_MAX];

    if (S_ISLNK(status->st_mode)) {
        ssize_t size = readlinkat(from_fd, name, target, sizeof target - 1);
        if (size < 0)
            fail(work, errno);
        target[size] = 0;
        if (symlinkat(target, to_fd, new_name) < 0)
            fail(work, errno);
    } else if (mknodat(to_fd, new_name, status->st_mode & (S_IFMT | 0777), status->st_rdev) < 0) {
        fail(work, errno);
    }
    if (fchownat(to_fd, new_name, status->st_uid, status->st_gid, AT_SYMLINK_NOFOLLOW) < 0 && errno != EPERM)
        fail(work, errno);
    utimensat(to_fd, new_name, times, AT_SYMLINK_NOFOLLOW);
}

static void copy_directory(struct copying *work, int from_fd, int to_fd, int depth);

static void copy_entry(struct copying *work, int from_fd, int to_fd, const char *name, const char *new_name, int depth)
{
    struct stat status;
    int fd = -1;

    beat(work);
    if (fstatat(from_fd, name, &status, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno == ENOENT && depth > 0)
            return; /* removed meanwhile */
        fail(work, errno);
    }
    work->result.entries++;
    if (!S_ISDIR(status.st_mode) && linked_before(work, to_fd, new_name, &status))
        return;
    if (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode)) {
        int flags = S_ISDIR(status.st_mode) ? O_RDONLY | O_DIRECTORY : O_RDONLY | O_NONBLOCK | O_NOCTTY;
        fd = file_open_below(from_fd, name, flags);
        if (fd < 0 || fstat(fd, &status) < 0)
            fail(work, errno);
        if (!file_is_storage(fd, &status) || !(S_ISREG(status.st_mode) || S_ISDIR(status.st_mode)))
            fail(work, EINVAL);
    }
    if (S_ISDIR(status.st_mode)) {
        if (work->has_root && status.st_ino == work->root.st_ino && status.st_dev == work->root.st_dev)
            fail(work, EINVAL); /* into itself */
        if (mkdirat(to_fd, new_name, 0700) < 0)
            fail(work, errno);
        int made_fd = file_open_below(to_fd, new_name, O_RDONLY | O_DIRECTORY);
        if (made_fd < 0)
            fail(work, errno);
        if (!work->has_root) {
            if (fstat(made_fd, &work->root) < 0)
                fail(work, errno);
            work->has_root = true;
        }
        copy_directory(work, fd, made_fd, depth + 1);
        finish_open(work, fd, made_fd, &status);
        close(made_fd);
    } else if (S_ISREG(status.st_mode)) {
        copy_file(work, fd, to_fd, new_name, &status);
    } else {
        copy_other(work, from_fd, to_fd, name, new_name, &status);
    }
    if (!S_ISDIR(status.st_mode) && status.st_nlink > 1)
        remember(work, &status);
    close_if_open(fd);
}

static void copy_directory(struct copying *work, int from_fd, int to_fd, int depth)
{
    size_t length = strlen(work->path);
    struct dirent *entry;
    int listed_fd = openat(from_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = listed_fd < 0 ? NULL : fdopendir(listed_fd);

    if (depth > DEPTH_MAX)
        fail(work, ENAMETOOLONG);
    if (!directory)
        fail(work, errno);
    while ((errno = 0, entry = readdir(directory))) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
            continue;
        if (length + strlen(name) + 2 > PATH_BYTES_MAX)
            fail(work, ENAMETOOLONG);
        work->path[length] = '/';
        strcpy(work->path + length + 1, name);
        copy_entry(work, from_fd, to_fd, name, name, depth);
        work->path[length] = 0;
    }
    if (errno)
        fail(work, errno);
    closedir(directory);
}

_Noreturn void file_copy(const struct request_view *request, struct outcome *outcome)
{
    static struct copying work;
    char *name, *new_name;

    if (request->target[0] != '/')
        file_refuse(request, STEP_PROTOCOL, EINVAL, outcome);
    int from_fd = file_open_parent(request->path, &name);
    if (from_fd < 0)
        file_refuse(request, STEP_FILE_COPY, errno, outcome);
    work.root_fd = file_open_parent(request->target, &new_name);
    if (work.root_fd < 0)
        file_refuse(request, STEP_FILE_COPY, errno, outcome);
    if (strlen(new_name) >= sizeof work.path)
        file_refuse(request, STEP_FILE_COPY, ENAMETOOLONG, outcome);
    strcpy(work.path, new_name);
    work.stream_fd = file_answer_stream(request, STEP_FILE_COPY, -1, outcome);
    copy_entry(&work, from_fd, work.root_fd, name, new_name, 0);
    stream_finish(work.stream_fd, work.result, NULL);
}
