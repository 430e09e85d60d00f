/*
 * A tar stream into a directory. Every name is resolved below that directory through no link, whatever the
 * archive holds and whatever a process of the sandbox plants meanwhile; files appear whole, under the
 * identity of the user, without device nodes and, unless asked for, without set-id bits.
 */
#include "file_work.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include "tar.h"

#define PATH_BYTES_MAX 4096
#define EXTENSION_BYTES_MAX (1 << 20)
#define PIECE 65536
#define HOLE 4096

struct made_directory {
    char *path;
    mode_t mode;
    int64_t modified_s;
};

struct unpacking {
    int stream_fd, root_fd;
    bool keep_set_id;
    int parent_fd; /* of the last entry: the next one is mostly beside it */
    char parent[PATH_BYTES_MAX];
    char path[PATH_BYTES_MAX], link[PATH_BYTES_MAX];
    char *long_path, *long_link; /* from an extension, for the next entry */
    int64_t long_size, long_modified_s;
    struct made_directory *directories;
    size_t directory_count, directory_capacity;
    struct file_result result;
};

static char piece[PIECE];

static _Noreturn void fail(struct unpacking *work, int error)
{
    work->result.error = error ? error : EIO;
    work->result.step = STEP_FILE_UNPACK;
    stream_finish(work->stream_fd, work->result, work->path);
}

static void need(struct unpacking *work, void *data, size_t size)
{
    if (stream_read(work->stream_fd, data, size) != 1)
        fail(work, EBADMSG); /* the archive ends too early */
}

static char *read_extension(struct unpacking *work, int64_t size)
{
    if (size < 0 || size > EXTENSION_BYTES_MAX)
        fail(work, EBADMSG);
    size_t padded = ((size_t)size + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK;
    char *text = calloc(1, padded + 1);
    if (!text)
        fail(work, ENOMEM);
    if (padded)
        need(work, text, padded);
    text[size] = 0;
    return text;
}

/* Records of "LENGTH KEY=VALUE\n"; what is not about name, link, size or time is left out. */
static void take_pax(struct unpacking *work, char *text, size_t size)
{
    char *cursor = text, *end = text + size;
    while (cursor < end) {
        char *rest;
        unsigned long length = strtoul(cursor, &rest, 10);
        if (*rest != ' ' || length > (unsigned long)(end - cursor) || cursor + length <= rest + 1 ||
            cursor[length - 1] != '\n')
            fail(work, EBADMSG);
        cursor[length - 1] = 0;
        char *key = rest + 1, *value = strchr(key, '=');
        if (value) {
            *value++ = 0;
            if (strcmp(key, "path") == 0) {
                free(work->long_path);
                work->long_path = strdup(value);
            } else if (strcmp(key, "linkpath") == 0) {
                free(work->long_link);
                work->long_link = strdup(value);
            } else if (strcmp(key, "size") == 0) {
                work->long_size = strtoll(value, NULL, 10);
            } else if (strcmp(key, "mtime") == 0) {
                work->long_modified_s = strtoll(value, NULL, 10);
            } else if (strncmp(key, "GNU.sparse", 10) == 0) {
                fail(work, EOPNOTSUPP);
            }
        }
        cursor += length;
    }
}

static void skip(struct unpacking *work, int64_t size)
{
    if (size < 0)
        fail(work, EBADMSG);
    for (int64_t left = (size + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK; left > 0;) {
        size_t now = left < PIECE ? (size_t)left : PIECE;
        need(work, piece, now);
        left -= (int64_t)now;
    }
}

/*
 * Write a name without "./", "//" and a last "/"; what is absolute, climbs or is too long is refused.
 * Returns false for the root itself.
 */
static bool normalise(struct unpacking *work, const char *text, char *clean)
{
    size_t size = 0;
    if (*text == '/')
        fail(work, EINVAL);
    while (*text) {
        size_t part = strcspn(text, "/");
        if (part == 2 && text[0] == '.' && text[1] == '.')
            fail(work, EINVAL);
        if (part > 0 && !(part == 1 && text[0] == '.')) {
            if (size + part + 2 > PATH_BYTES_MAX)
                fail(work, ENAMETOOLONG);
            if (size)
                clean[size++] = '/';
            memcpy(clean + size, text, part);
            size += part;
        }
        text += part;
        text += strspn(text, "/");
    }
    clean[size] = 0;
    return size > 0;
}

/* Open the directory above a clean path, making what is missing; name points at the last part. */
static int parent_of(struct unpacking *work, char *path, const char **name)
{
    char *slash = strrchr(path, '/');
    *name = slash ? slash + 1 : path;
    size_t size = slash ? (size_t)(slash - path) : 0;
    if (work->parent_fd >= 0 && strlen(work->parent) == size && memcmp(work->parent, path, size) == 0)
        return work->parent_fd;
    close_if_open(work->parent_fd);
    work->parent_fd = -1;
    memcpy(work->parent, path, size);
    work->parent[size] = 0;
    int fd = file_open_below(work->root_fd, work->parent, O_PATH | O_DIRECTORY);
    if (fd < 0 && errno == ENOENT) { /* archives may leave directories out */
        fd = file_open_below(work->root_fd, "", O_PATH | O_DIRECTORY);
        for (char *cursor = work->parent; fd >= 0 && *cursor;) {
            size_t part = strcspn(cursor, "/");
            char kept = cursor[part];
            cursor[part] = 0;
            if (mkdirat(fd, cursor, 0755) < 0 && errno != EEXIST)
                fail(work, errno);
            int next = file_open_below(fd, cursor, O_PATH | O_DIRECTORY);
            int error = errno;
            close(fd);
            errno = error;
            fd = next;
            cursor[part] = kept;
            cursor += part + (kept != 0);
        }
    }
    if (fd < 0)
        fail(work, errno);
    return work->parent_fd = fd;
}

static void remember_directory(struct unpacking *work, mode_t mode, int64_t modified_s)
{
    if (work->directory_count == work->directory_capacity) {
        size_t capacity = work->directory_capacity ? 2 * work->directory_capacity : 256;
        void *grown = realloc(work->directories, capacity * sizeof *work->directories);
        if (!grown)
            fail(work, ENOMEM);
        work->directories = grown;
        work->directory_capacity = capacity;
    }
    char *path = strdup(work->path);
    if (!path)
        fail(work, ENOMEM);
    work->directories[work->directory_count++] = (struct made_directory){path, mode, modified_s};
}

static void make_directory(struct unpacking *work, mode_t mode, int64_t modified_s)
{
    const char *name;
    struct stat status;
    int parent_fd = parent_of(work, work->path, &name);
    /* Writable until all is in it; its own mode comes last. */
    if (mkdirat(parent_fd, name, mode | 0700) < 0) {
        if (errno != EEXIST)
            fail(work, errno);
        if (fstatat(parent_fd, name, &status, AT_SYMLINK_NOFOLLOW) < 0)
            fail(work, errno);
        if (!S_ISDIR(status.st_mode))
            fail(work, EEXIST);
    }
    remember_directory(work, mode, modified_s);
}

/* Give what make() makes a name, in the place of a file or link that has it. */
static void put_in_place(struct unpacking *work, int parent_fd, const char *name,
                         int (*make)(struct unpacking *, int, const char *, int), int argument)
{
    char temporary[64];
    static unsigned serial;
    if (make(work, parent_fd, name, argument) == 0)
        return;
    if (errno != EEXIST)
        fail(work, errno);
    snprintf(temporary, sizeof temporary, ".dsec-unpack-%d-%u", getpid(), serial++);
    if (make(work, parent_fd, temporary, argument) < 0)
        fail(work, errno);
    if (renameat(parent_fd, temporary, parent_fd, name) < 0) {
        int error = errno;
        unlinkat(parent_fd, temporary, 0);
        fail(work, error);
    }
    unlinkat(parent_fd, temporary, 0); /* both may be one file already, and then rename does nothing */
}

static int make_file(struct unpacking *work, int parent_fd, const char *name, int fd)
{
    (void)work;
    char path[64];
    if (linkat(fd, "", parent_fd, name, AT_EMPTY_PATH) == 0)
        return 0;
    if (errno != ENOENT)
        return -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd); /* before Linux 6.10 */
    return linkat(AT_FDCWD, path, parent_fd, name, AT_SYMLINK_FOLLOW);
}

static int make_symlink(struct unpacking *work, int parent_fd, const char *name, int argument)
{
    (void)argument;
    return symlinkat(work->link, parent_fd, name);
}

static int make_hard_link(struct unpacking *work, int parent_fd, const char *name, int source_fd)
{
    const char *slash = strrchr(work->link, '/');
    return linkat(source_fd, slash ? slash + 1 : work->link, parent_fd, name, 0);
}

static bool is_zero(const char *data, size_t size)
{
    return data[0] == 0 && memcmp(data, data + 1, size - 1) == 0;
}

/* Content in blocks; those of zeros only stay holes. */
static void write_piece(struct unpacking *work, int fd, size_t size, int64_t offset)
{
    for (size_t at = 0; at < size;) {
        size_t run = 0;
        while (at + run < size) {
            size_t block = size - at - run < HOLE ? size - at - run : HOLE;
            if (is_zero(piece + at + run, block)) {
                if (run == 0) {
                    at += block;
                    continue;
                }
                break;
            }
            run += block;
        }
        for (size_t done = 0; done < run;) {
            ssize_t written = pwrite(fd, piece + at + done, run - done, offset + (int64_t)(at + done));
            if (written <= 0)
                fail(work, errno);
            done += (size_t)written;
        }
        at += run;
    }
}

static void make_regular(struct unpacking *work, int64_t size, mode_t mode, int64_t modified_s)
{
    const char *name;
    struct stat status;
    int parent_fd = parent_of(work, work->path, &name);
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = modified_s}};

    if (size < 0)
        fail(work, EBADMSG);
    int fd = openat(parent_fd, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0)
        fail(work, errno == EOPNOTSUPP ? EACCES : errno);
    for (int64_t at = 0; at < size;) {
        size_t now = size - at < PIECE ? (size_t)(size - at) : PIECE;
        size_t padded = (now + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK;
        need(work, piece, padded);
        write_piece(work, fd, now, at);
        at += (int64_t)now;
        work->result.bytes += now;
    }
    /* Only where the file ends in a hole; a check for quota and size comes with it. */
    if (size > 0 && (fstat(fd, &status) < 0 || (status.st_size < size && ftruncate(fd, size) < 0)))
        fail(work, errno);
    if (fchmod(fd, mode) < 0 || futimens(fd, times) < 0)
        fail(work, errno);
    put_in_place(work, parent_fd, name, make_file, fd);
    close(fd);
}

static void make_link(struct unpacking *work, char kind)
{
    const char *name, *source_name;
    char source[PATH_BYTES_MAX];

    if (kind == '2') {
        int parent_fd = parent_of(work, work->path, &name);
        put_in_place(work, parent_fd, name, make_symlink, 0);
        return;
    }
    if (!normalise(work, work->link, source))
        fail(work, EINVAL);
    strcpy(work->link, source);
    int source_fd = dup(parent_of(work, source, &source_name));
    if (source_fd < 0)
        fail(work, errno);
    int parent_fd = parent_of(work, work->path, &name);
    put_in_place(work, parent_fd, name, make_hard_link, source_fd);
    close(source_fd);
}

static void field(char *target, size_t capacity, const char *text, size_t size)
{
    size_t length = strnlen(text, size);
    if (length >= capacity)
        length = capacity - 1;
    memcpy(target, text, length);
    target[length] = 0;
}

/* Name and link target of an entry, from its header or the extensions before it. */
static void take_names(struct unpacking *work, const struct tar_header *header, char *raw)
{
    size_t used = 0;
    if (work->long_path && strlen(work->long_path) >= PATH_BYTES_MAX)
        fail(work, ENAMETOOLONG);
    if (work->long_link && strlen(work->long_link) >= PATH_BYTES_MAX)
        fail(work, ENAMETOOLONG);
    if (work->long_path) {
        strcpy(raw, work->long_path);
    } else {
        if (memcmp(header->magic, "ustar\0", 6) == 0 && header->prefix[0]) {
            field(raw, sizeof header->prefix + 1, header->prefix, sizeof header->prefix);
            used = strlen(raw);
            raw[used++] = '/';
        }
        field(raw + used, sizeof header->name + 1, header->name, sizeof header->name);
    }
    if (work->long_link)
        strcpy(work->link, work->long_link);
    else
        field(work->link, sizeof work->link, header->link, sizeof header->link);
    free(work->long_path);
    free(work->long_link);
    work->long_path = work->long_link = NULL;
}

static void take_entry(struct unpacking *work, const struct tar_header *header)
{
    char raw[PATH_BYTES_MAX], clean[PATH_BYTES_MAX];
    int64_t size = work->long_size >= 0 ? work->long_size : tar_number(header->size, sizeof header->size);
    int64_t modified_s = work->long_modified_s != INT64_MIN ? work->long_modified_s
                                                            : tar_number(header->modified, sizeof header->modified);
    mode_t mode = (mode_t)tar_number(header->mode, sizeof header->mode) & (work->keep_set_id ? 07777 : 0777);

    take_names(work, header, raw);
    work->long_size = -1;
    work->long_modified_s = INT64_MIN;
    field(work->path, sizeof work->path, raw, sizeof raw); /* what a failure names */
    if (!normalise(work, raw, clean)) {
        skip(work, header->kind == '5' ? 0 : size);
        return;
    }
    strcpy(work->path, clean);
    switch (header->kind) {
    case '0':
    case 0:
    case '7':
        if (raw[strlen(raw) - 1] == '/') { /* a directory of the oldest archives */
            make_directory(work, mode, modified_s);
            break;
        }
        make_regular(work, size, mode, modified_s);
        break;
    case '1':
    case '2':
        make_link(work, header->kind);
        skip(work, size);
        break;
    case '5':
        make_directory(work, mode, modified_s);
        break;
    default: /* devices, pipes, sparse maps, volumes */
        fail(work, EOPNOTSUPP);
    }
    work->result.entries++;
}

/* The deepest directories first: a mode may close them. */
static void finish_directories(struct unpacking *work)
{
    for (size_t i = work->directory_count; i-- > 0;) {
        struct made_directory *directory = &work->directories[i];
        struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = directory->modified_s}};
        int fd = file_open_below(work->root_fd, directory->path, O_RDONLY | O_DIRECTORY);
        strcpy(work->path, directory->path);
        if (fd < 0 && errno == EACCES)
            continue; /* it was there, and is not ours */
        if (fd < 0)
            fail(work, errno);
        /* One of somebody else keeps its mode and time. */
        if ((fchmod(fd, directory->mode) < 0 || futimens(fd, times) < 0) && errno != EPERM)
            fail(work, errno);
        close(fd);
    }
}

static void unpack(struct unpacking *work)
{
    struct tar_header header;
    static const struct tar_header nothing;

    while (stream_read(work->stream_fd, &header, sizeof header) == 1) {
        if (memcmp(&header, &nothing, sizeof header) == 0) {
            while (stream_read(work->stream_fd, piece, TAR_BLOCK) == 1) /* padding, to the end */
                ;
            finish_directories(work);
            work->path[0] = 0;
            stream_finish(work->stream_fd, work->result, NULL);
        }
        if (!tar_checksum_fits(&header))
            fail(work, EBADMSG);
        int64_t size = tar_number(header.size, sizeof header.size);
        if (header.kind == 'L') {
            free(work->long_path);
            work->long_path = read_extension(work, size);
        } else if (header.kind == 'K') {
            free(work->long_link);
            work->long_link = read_extension(work, size);
        } else if (header.kind == 'x') {
            char *text = read_extension(work, size);
            take_pax(work, text, (size_t)size);
            free(text);
        } else if (header.kind == 'g') {
            skip(work, size);
        } else {
            take_entry(work, &header);
        }
    }
    fail(work, EBADMSG); /* no end mark */
}

_Noreturn void file_unpack(const struct request_view *request, struct outcome *outcome)
{
    static struct unpacking work;
    struct stat status;

    work = (struct unpacking){.parent_fd = -1, .long_size = -1, .long_modified_s = INT64_MIN,
                              .keep_set_id = request->header->mode & FILE_MODE_SET_ID};
    if (file_make_directory(request->path, 0755, true) < 0)
        file_refuse(request, STEP_FILE_MKDIR, errno, outcome);
    work.root_fd = open(request->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (work.root_fd < 0 || fstat(work.root_fd, &status) < 0)
        file_refuse(request, STEP_FILE_UNPACK, errno, outcome);
    if (!file_is_storage(work.root_fd, &status))
        file_refuse(request, STEP_FILE_KIND, EACCES, outcome);
    work.stream_fd = file_answer_stream(request, STEP_FILE_UNPACK, -1, outcome);
    unpack(&work);
    _exit(0);
}
