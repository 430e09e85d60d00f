/* What the file operations share. Every function here runs in a forked child with its user's identity. */
#ifndef DSEC_FILE_WORK_H
#define DSEC_FILE_WORK_H

#include <sys/stat.h>

#include "pid1.h"

/* ---- answers on the control socket ---- */

/* Each sends the answer, with a descriptor if it is not -1, and ends the process. */
_Noreturn void file_answer(const struct request_view *request, struct control_reply *reply, int fd,
                           struct outcome *outcome);
_Noreturn void file_refuse(const struct request_view *request, enum dsec_step step, int error,
                           struct outcome *outcome);
/* Answer with a socket and, if it is not -1, a second descriptor. Returns our end of the socket. */
int file_answer_stream(const struct request_view *request, enum dsec_step step, int second_fd,
                       struct outcome *outcome);

/* ---- frames on a stream ---- */

/* Each ends the process when nobody reads any more. */
void stream_frame(int stream_fd, const void *header, size_t header_size, const void *data, size_t size);
_Noreturn void stream_finish(int stream_fd, struct file_result result, const char *path);
/* Exactly size bytes: 1; the stream's end before the first of them: 0, after it: -1. */
int stream_read(int stream_fd, void *data, size_t size);

/* ---- paths ---- */

/* The sandbox's own layer, its tmpfs mounts and the run directory: what may be read and written from outside. */
bool file_is_storage(int fd, const struct stat *status);
/* mkdir of path, and with parents of those above it, too. Returns 0, or -1 with errno. */
int file_make_directory(char *path, mode_t mode, bool parents);
/*
 * Open the directory that holds path and point name at its last part, which is no "." or "..".
 * Trailing slashes are cut off. Returns -1 with errno; EBUSY for the root itself.
 */
int file_open_parent(char *path, char **name);
/* Open a directory below root by a relative path, through no link and into no other mount. */
int file_open_below(int root_fd, const char *path, int flags);

/* ---- the operations with a page of their own; they answer and end ---- */

_Noreturn void file_list(const struct request_view *request, struct outcome *outcome);
_Noreturn void file_put(const struct request_view *request, struct outcome *outcome);
_Noreturn void file_remove(const struct request_view *request, struct outcome *outcome);
_Noreturn void file_unpack(const struct request_view *request, struct outcome *outcome);
_Noreturn void file_pack(const struct request_view *request, struct outcome *outcome);
_Noreturn void file_watch(const struct request_view *request, struct outcome *outcome);
_Noreturn void file_copy(const struct request_view *request, struct outcome *outcome);
#endif
