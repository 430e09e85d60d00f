/* One page of a directory, sorted by name, each name with what it is: one request, however many. */
#include "file_work.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static int by_name(const void *left, const void *right)
{
    return strcmp(*(char *const *)left, *(char *const *)right);
}

/* Keep the first limit names. */
static size_t cut(char **names, size_t count, size_t limit)
{
    qsort(names, count, sizeof *names, by_name);
    for (size_t i = limit; i < count; i++)
        free(names[i]);
    return count < limit ? count : limit;
}

static void write_entry(FILE *stream, int directory_fd, const char *name)
{
    struct stat status;
    char target[4096];
    struct list_entry entry = {.name_bytes = (uint32_t)strlen(name)};
    ssize_t target_bytes = 0;

    /* What may not be looked at is still a name. */
    if (fstatat(directory_fd, name, &status, AT_SYMLINK_NOFOLLOW) == 0) {
        entry.mode = status.st_mode;
        entry.user_id = status.st_uid;
        entry.group_id = status.st_gid;
        entry.size_bytes = (uint64_t)status.st_size;
        entry.modified_ns = status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec;
        if (S_ISLNK(status.st_mode))
            target_bytes = readlinkat(directory_fd, name, target, sizeof target);
    }
    entry.target_bytes = target_bytes > 0 ? (uint32_t)target_bytes : 0;
    fwrite(&entry, sizeof entry, 1, stream);
    fwrite(name, 1, entry.name_bytes, stream);
    fwrite(target, 1, entry.target_bytes, stream);
}

_Noreturn void file_list(const struct request_view *request, struct outcome *outcome)
{
    struct control_reply reply = {0};
    size_t limit = request->header->mode, count = 0;
    struct dirent *entry;

    if (limit < 1 || limit > DSEC_LIST_NAMES_MAX)
        file_refuse(request, STEP_PROTOCOL, EINVAL, outcome);
    DIR *directory = opendir(request->path);
    if (!directory)
        file_refuse(request, STEP_FILE_LIST, errno, outcome);
    char **names = calloc(2 * limit, sizeof *names);
    int list_fd = memfd_create("names", MFD_CLOEXEC);
    FILE *stream = list_fd < 0 || !names ? NULL : fdopen(dup(list_fd), "w");
    if (!stream)
        file_refuse(request, STEP_FILE_LIST, errno, outcome);
    while ((entry = readdir(directory))) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || strcmp(name, request->target) <= 0)
            continue;
        if (count == 2 * limit) {
            count = cut(names, count, limit);
            reply.status = 1; /* there is more */
        }
        if (!(names[count++] = strdup(name)))
            file_refuse(request, STEP_FILE_LIST, ENOMEM, outcome);
    }
    if (count > limit)
        reply.status = 1;
    count = cut(names, count, limit);
    for (size_t i = 0; i < count; i++)
        write_entry(stream, dirfd(directory), names[i]);
    if (fclose(stream) != 0)
        file_refuse(request, STEP_FILE_LIST, errno, outcome);
    reply.size_bytes = count;
    file_answer(request, &reply, list_fd, outcome);
}
