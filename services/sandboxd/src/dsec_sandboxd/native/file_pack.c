/*
 * A directory as a tar stream: directories, files and links, sorted by name, below that directory only.
 * Each file is read through one descriptor, as long as it was when it was opened. One that was written to meanwhile
 * is read again: what is the same both times was all there at once, as in a log that grows. Else the stream ends.
 */
#include "file_work.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include "tar.h"

#define DEPTH_MAX 256
#define PATH_BYTES_MAX 4096

struct packing {
    int stream_fd;
    size_t used;
    char path[PATH_BYTES_MAX];
    struct file_result result;
    char buffer[DSEC_FRAME_BYTES_MAX];
};

static _Noreturn void fail(struct packing *work, int error)
{
    work->result.error = error ? error : EIO;
    work->result.step = STEP_FILE_PACK;
    stream_finish(work->stream_fd, work->result, work->path);
}

static void flush(struct packing *work)
{
    if (work->used)
        stream_frame(work->stream_fd, NULL, 0, work->buffer, work->used);
    work->used = 0;
}

static char *room(struct packing *work, size_t size)
{
    if (sizeof work->buffer - work->used < size)
        flush(work);
    return work->buffer + work->used;
}

static void put_padded(struct packing *work, const char *text, size_t size)
{
    for (size_t at = 0; at < size; at += TAR_BLOCK) {
        char *block = room(work, TAR_BLOCK);
        size_t now = size - at < TAR_BLOCK ? size - at : TAR_BLOCK;
        memset(block, 0, TAR_BLOCK);
        memcpy(block, text + at, now);
        work->used += TAR_BLOCK;
    }
}

/* Octal where it fits, else base 256. */
static void put_number(char *text, size_t size, uint64_t value)
{
    if (value >> (3 * (size - 1)) == 0) {
        snprintf(text, size, "%0*llo", (int)size - 1, (unsigned long long)value);
        return;
    }
    for (size_t i = size; i-- > 1; value >>= 8)
        text[i] = (char)value;
    text[0] = (char)0x80;
}

static void put_header(struct packing *work, const char *name, const char *link, char kind,
                       const struct stat *status, uint64_t size)
{
    struct tar_header *header = (struct tar_header *)room(work, TAR_BLOCK);
    memset(header, 0, sizeof *header);
    memcpy(header->name, name, strnlen(name, sizeof header->name));
    memcpy(header->link, link, strnlen(link, sizeof header->link));
    put_number(header->mode, sizeof header->mode, status ? status->st_mode & 07777 : 0644);
    put_number(header->user_id, sizeof header->user_id, status ? status->st_uid : 0);
    put_number(header->group_id, sizeof header->group_id, status ? status->st_gid : 0);
    put_number(header->size, sizeof header->size, size);
    put_number(header->modified, sizeof header->modified,
               status && status->st_mtim.tv_sec > 0 ? (uint64_t)status->st_mtim.tv_sec : 0);
    header->kind = kind;
    memcpy(header->magic, "ustar  ", 8);
    memset(header->checksum, ' ', sizeof header->checksum);
    unsigned sum = 0;
    for (size_t i = 0; i < TAR_BLOCK; i++)
        sum += ((const unsigned char *)header)[i];
    snprintf(header->checksum, sizeof header->checksum, "%06o", sum);
    work->used += TAR_BLOCK;
}

static void put_entry(struct packing *work, const char *link, char kind, const struct stat *status, uint64_t size)
{
    char name[PATH_BYTES_MAX + 1];
    snprintf(name, sizeof name, "%s%s", work->path, kind == '5' ? "/" : "");
    if (strlen(name) > sizeof ((struct tar_header *)0)->name) {
        put_header(work, "././@LongLink", "", 'L', NULL, strlen(name) + 1);
        put_padded(work, name, strlen(name) + 1);
    }
    if (strlen(link) > sizeof ((struct tar_header *)0)->link) {
        put_header(work, "././@LongLink", "", 'K', NULL, strlen(link) + 1);
        put_padded(work, link, strlen(link) + 1);
    }
    put_header(work, name, link, kind, status, size);
    work->result.entries++;
}

/* Not against forgery: who writes the file could as well have written this. A size is of whole words but at the end. */
static uint64_t digest_of(uint64_t digest, const char *data, size_t size)
{
    for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
        uint64_t word = 0;
        memcpy(&word, data + at, size - at < sizeof word ? size - at : sizeof word);
        digest = (digest ^ word) * 0x9e3779b97f4a7c15;
        digest ^= digest >> 32;
    }
    return digest;
}

static void read_whole(struct packing *work, int fd, char *target, size_t size)
{
    for (size_t at = 0; at < size;) {
        ssize_t got = read(fd, target + at, size - at);
        if (got < 0)
            fail(work, errno);
        if (got == 0)
            fail(work, ESTALE); /* it became shorter */
        at += (size_t)got;
    }
}

static uint64_t put_content(struct packing *work, int fd, uint64_t size)
{
    uint64_t digest = 0;

    for (uint64_t left = size; left > 0;) {
        char *target = room(work, TAR_BLOCK);
        size_t space = sizeof work->buffer - work->used;
        size_t now = left < space ? (size_t)left : space;
        read_whole(work, fd, target, now);
        digest = digest_of(digest, target, now);
        work->used += now;
        left -= now;
        work->result.bytes += now;
        if (work->used == sizeof work->buffer)
            flush(work);
    }
    size_t padding = (TAR_BLOCK - size % TAR_BLOCK) % TAR_BLOCK;
    memset(room(work, padding), 0, padding);
    work->used += padding;
    return digest;
}

static uint64_t digest_again(struct packing *work, int fd, uint64_t size)
{
    static char piece[DSEC_FRAME_BYTES_MAX];
    uint64_t digest = 0;

    if (lseek(fd, 0, SEEK_SET) < 0)
        fail(work, errno);
    for (uint64_t left = size; left > 0;) {
        size_t now = left < sizeof piece ? (size_t)left : sizeof piece;
        read_whole(work, fd, piece, now);
        digest = digest_of(digest, piece, now);
        left -= now;
    }
    return digest;
}

static void pack_file(struct packing *work, int directory_fd, const char *name)
{
    struct stat before, after;
    int fd = file_open_below(directory_fd, name, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 && errno == ENOENT)
        return; /* removed meanwhile */
    if (fd < 0 || fstat(fd, &before) < 0)
        fail(work, errno);
    if (S_ISREG(before.st_mode) && file_is_storage(fd, &before)) {
        uint64_t size = (uint64_t)before.st_size;
        put_entry(work, "", '0', &before, size);
        uint64_t digest = put_content(work, fd, size);
        if (fstat(fd, &after) < 0)
            fail(work, errno);
        bool touched = memcmp(&before.st_mtim, &after.st_mtim, sizeof before.st_mtim) != 0;
        if (touched && digest_again(work, fd, size) != digest)
            fail(work, ESTALE);
    }
    close(fd);
}

static int by_name(const struct dirent **left, const struct dirent **right)
{
    return strcmp((*left)->d_name, (*right)->d_name);
}

static int is_entry(const struct dirent *entry)
{
    return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
}

static void pack_directory(struct packing *work, int directory_fd, int depth);

static void pack_entry(struct packing *work, int directory_fd, const char *name, int depth)
{
    struct stat status;
    char target[PATH_BYTES_MAX];

    if (fstatat(directory_fd, name, &status, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno == ENOENT)
            return;
        fail(work, errno);
    }
    if (S_ISREG(status.st_mode)) {
        pack_file(work, directory_fd, name);
    } else if (S_ISLNK(status.st_mode)) {
        ssize_t size = readlinkat(directory_fd, name, target, sizeof target - 1);
        if (size < 0)
            fail(work, errno);
        target[size] = 0;
        put_entry(work, target, '2', &status, 0);
    } else if (S_ISDIR(status.st_mode)) {
        int fd = file_open_below(directory_fd, name, O_RDONLY | O_DIRECTORY);
        if (fd < 0 && errno == EXDEV)
            return; /* another mount: /proc, /dev */
        if (fd < 0)
            fail(work, errno);
        put_entry(work, "", '5', &status, 0);
        pack_directory(work, fd, depth + 1);
        close(fd);
    }
}

static void pack_directory(struct packing *work, int directory_fd, int depth)
{
    struct dirent **entries;
    size_t length = strlen(work->path);

    if (depth > DEPTH_MAX)
        fail(work, ENAMETOOLONG);
    /* Names are looked up below descriptors; the working directory is for this alone. */
    int count = fchdir(directory_fd) < 0 ? -1 : scandir(".", &entries, is_entry, by_name);
    if (count < 0)
        fail(work, errno);
    for (int i = 0; i < count; i++) {
        const char *name = entries[i]->d_name;
        if (length + strlen(name) + 2 > PATH_BYTES_MAX - 1)
            fail(work, ENAMETOOLONG);
        if (length)
            work->path[length] = '/';
        strcpy(work->path + length + (length > 0), name);
        pack_entry(work, directory_fd, name, depth);
        work->path[length] = 0;
        free(entries[i]);
    }
    free(entries);
}

_Noreturn void file_pack(const struct request_view *request, struct outcome *outcome)
{
    static struct packing work;
    struct stat status;

    int root_fd = open(request->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root_fd < 0 || fstat(root_fd, &status) < 0)
        file_refuse(request, STEP_FILE_PACK, errno, outcome);
    if (!file_is_storage(root_fd, &status))
        file_refuse(request, STEP_FILE_KIND, EINVAL, outcome);
    work.stream_fd = file_answer_stream(request, STEP_FILE_PACK, -1, outcome);
    pack_directory(&work, root_fd, 0);
    for (int i = 0; i < 2; i++) {
        memset(room(&work, TAR_BLOCK), 0, TAR_BLOCK);
        work.used += TAR_BLOCK;
    }
    flush(&work);
    stream_finish(work.stream_fd, work.result, NULL);
}
