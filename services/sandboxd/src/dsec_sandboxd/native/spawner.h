/* The spawner's parts. It is one thread; every structure here belongs to it alone. */
#ifndef DSEC_SPAWNER_H
#define DSEC_SPAWNER_H

#include <linux/filter.h>

#include "protocol.h"
#include "sys.h"

/* Descriptors that outlive a request start here; children cut their table off below it. */
#define LONG_LIVED_FD_MIN 1000

/* The tiny mount namespace that every sandbox is born in. */
#define TINY_NEW_ROOT "/new"
#define TINY_DEV "/dev"
#define TINY_EMPTY_FILE "/empty-file"
#define TINY_EMPTY_DIRECTORY "/empty-directory"

struct failure {
    enum dsec_step step;
    int error;
};

/* Record errno under a step; returns -1 so that callers can `return fail(...)`. */
int fail(struct failure *failure, enum dsec_step step);
/* Move a descriptor to the long-lived range, close-on-exec; the old one is closed. */
int make_long_lived(int fd);

struct host {
    int init_fd;         /* O_PATH of PID 1's program on a private mount, root-owned, 0711 */
    int own_network_fd;  /* the spawner's own empty network namespace */
    struct sock_fprog filter;
};

/* Leave the host's mounts for the tiny namespace and prepare what is shared by all sandboxes. */
int host_prepare(struct host *host, const char *init_path, int filter_fd, struct failure *failure);

/* What an id range keeps from one sandbox to the next. */
struct slot {
    uint32_t base_id;
    int mapping_fd;  /* a user namespace whose only use is to map mounts; 0 until made */
    int network_fd;  /* an empty network namespace owned by the host; 0 until made */
    int writable_fd; /* the living sandbox's writable layer; 0 when there is none */
};

int slot_warm(struct slot *slot, uint32_t base_id, int own_network_fd, struct failure *failure);
/*
 * After a sandbox: let go of its network namespace if it was used. Closed connections linger in it for a
 * minute, hold their ports, and its counters tell of them.
 */
void slot_renew_network(struct slot *slot, int own_network_fd);
/*
 * After a sandbox: let go of its writable layer. Whoever holds a layer last frees all that is in it, which takes
 * seconds for gigabytes: a process of its own does that for a large one, so that creations need not wait.
 */
void slot_release_layer(struct slot *slot);
/* Write a process's two id maps. */
int write_id_maps(pid_t pid, const char *map);
/* When the node itself runs out of memory, sandboxes go before its services. */
int write_oom_score(pid_t pid);

/* Mount an EROFS image detached; returns its descriptor or -1. */
int mount_layer(int image_fd, struct failure *failure);

struct sandbox_mounts {
    int overlay_fd;  /* detached: the root */
    int shared_fd;   /* detached: /dev/shm, a directory of the writable layer */
    int writable_fd; /* detached: the writable layer as a whole */
};

/* Make a sandbox's root from held layers. On failure nothing stays open. */
int mount_root(const struct spawner_request *request, const int *layer_fds, int mapping_fd,
               struct sandbox_mounts *mounts, struct failure *failure);

struct child_plan {
    const struct host *host;
    const struct spawner_request *request;
    int control_fd;   /* the child's end */
    int host_end_fd;
    const int *controller_fds;
};

/* The process that becomes the sandbox: never returns. */
_Noreturn void child_main(const struct child_plan *plan);

#endif
