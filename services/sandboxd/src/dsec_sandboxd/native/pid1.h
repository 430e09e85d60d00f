/* PID 1's parts: it forks commands and file operations, and trusts nothing that runs beside it. */
#ifndef DSEC_PID1_H
#define DSEC_PID1_H

#include <poll.h>
#include <stdbool.h>
#include <sys/resource.h>

#include "protocol.h"
#include "sys.h"

/* Where a forked child tells its parent why it never became what it should: shared memory. */
struct outcome {
    int32_t step;
    int32_t error;
};

/* A request's strings, checked: every pointer is inside the payload and NUL-terminated. */
struct request_view {
    const struct control_request *header;
    char *user;
    char *path;       /* working directory, or the file */
    char *target;     /* of a rename; the last name of the page before, of a list */
    char **arguments; /* NULL-terminated */
    char **environment;
};

struct identity {
    uint32_t user_id, group_id;
    uint32_t groups[64];
    int group_count;
    char home[256];
};

/* Resolve "number", "number:number" or a name by the sandbox's own files. Returns 0 or an errno. */
int resolve_user(const char *user, struct identity *identity);
/* Become that user for good. Returns 0 or an errno. */
int assume_identity(const struct identity *identity);

/* One for each command, then one for each file operation. */
extern struct outcome *outcomes;
/* What PID 1 was given; it needs more for itself. */
extern struct rlimit command_descriptor_limit;

/* Tell the daemon that something did not come to be. */
void tell_failure(uint32_t kind, uint32_t id, enum dsec_step step, int error);

/* A command's descriptors; -1 where there is none. */
struct streams {
    int child[3]; /* what becomes its standard streams, until it has them */
    int input;    /* the writing end of its standard input */
    int output;   /* the reading end, or the terminal's master */
    int error;
    int spool;    /* the daemon's: what of the input is on its way, shared with its successor */
    int relay[2]; /* of a terminal: what was printed passes through this pipe */
};

/* Open what a request asks for. On failure -1 with errno, the step, and something to close. */
int streams_open(struct streams *streams, const struct control_request *header, int spool_fd, enum dsec_step *step);
/* Close the child's ends. */
void streams_close_child(struct streams *streams);
/* Close all that is open. Idempotent. */
void streams_close(struct streams *streams);

/* ---- commands.c ---- */

#define SINKS_MAX 512

void commands_start(const struct request_view *view, int cgroup_fd, int spool_fd);
/* The daemon has read all: read on into nothing. */
void commands_finish(uint32_t id);
void commands_close_stdin(uint32_t id);
void commands_signal(const struct control_request *header, int cgroup_fd);
/* Whether the process that ended was a command. */
bool commands_note_exit(pid_t pid, int status);
/* Begin to list every command with its descriptors, from the first. */
void commands_list(uint32_t id);
/* Whether something waits to be told, as soon as the socket has room. */
bool commands_have_news(void);
/* Tell of ends; alone: nothing runs in the sandbox but PID 1. */
void commands_tell(bool alone);
/* How long until commands_look_at_held is to be called, for poll; -1: none is held. */
int commands_wait_ms(void);
/* Hand over held commands that last or print much. */
void commands_look_at_held(void);
int commands_watch_sinks(struct pollfd *polled);
void commands_drain_sinks(const struct pollfd *polled, int count);

/* Become the command; on failure write the outcome and end. */
_Noreturn void command_child(const struct request_view *request, const int streams[3], struct outcome *outcome);
/* Whether a file operation takes a third string. */
bool file_takes_target(uint32_t operation);
/* Do one file operation as its user, answer on the control socket, set the outcome and end. */
_Noreturn void file_child(const struct request_view *request, struct outcome *outcome);

#endif
