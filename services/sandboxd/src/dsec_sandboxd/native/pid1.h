/* PID 1's parts: it forks commands and file operations, and trusts nothing that runs beside it. */
#ifndef DSEC_PID1_H
#define DSEC_PID1_H

#include <stdbool.h>

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
    char *target;     /* of a rename */
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

/* Become the command; on failure write the outcome and end. */
_Noreturn void command_child(const struct request_view *request, const int streams[3], struct outcome *outcome);
/* Do one file operation as its user, answer on the control socket, set the outcome and end. */
_Noreturn void file_child(const struct request_view *request, struct outcome *outcome);

#endif
