/* The spawner's parts. It is one thread; every structure here belongs to it alone. */
#ifndef DSEC_SPAWNER_H
#define DSEC_SPAWNER_H

#include <stdbool.h>
#include <linux/filter.h>

#include "protocol.h"
#include "sys.h"

/* Descriptors that outlive a request start here; children cut their table off below it. */
#define LONG_LIVED_FD_MIN 1000

/* The tiny mount namespace that every sandbox is born in. */
#define TINY_NEW_ROOT "/new"
#define TINY_FURNITURE "/furniture"

struct failure {
    enum dsec_step step;
    int error;
};

/* Record errno under a step; returns -1 so that callers can `return fail(...)`. */
int fail(struct failure *failure, enum dsec_step step);
/* The same for a request that cannot be meant so. */
int refuse(struct failure *failure, int error);
/* Move a descriptor to the long-lived range, close-on-exec; the old one is closed. */
int make_long_lived(int fd);

struct host {
    int init_fd;         /* O_PATH of PID 1's program on a private mount, root-owned, 0711 */
    int own_network_fd;  /* the spawner's own empty network namespace */
    struct sock_fprog filter;
    uint64_t ignored;    /* signals that the spawner ignores, itself or because its daemon does: 1 << (number - 1) */
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
/* The same for any mount, by its last descriptor here. */
void release_mount(int mount_fd);
/* Write a process's two id maps. */
int write_id_maps(pid_t pid, const char *map);
/* When the node itself runs out of memory, sandboxes go before its services. */
int write_oom_score(pid_t pid);

/* Mount an EROFS image detached; returns its descriptor or -1. */
int mount_layer(int image_fd, struct failure *failure);

/* A tree that is mounted already: the root of a mount, a directory of a tmpfs. Returns its descriptor or -1. */
int copy_of_mount(int fd, struct failure *failure);
/* Detached mounts with a sandbox's ids, or -1 with errno: of a held layer, and of a new tmpfs that anybody may write. */
int clone_layer(int layer_fd, int mapping_fd);
int make_volume(uint64_t bytes, uint64_t inodes, int mapping_fd);

struct sandbox_mounts {
    int overlay_fd;  /* detached: the root */
    int shared_fd;   /* detached: /dev/shm, a directory of the writable layer */
    int furniture_fd; /* detached: dev and masks, directories of the writable layer */
    int writable_fd; /* detached: the writable layer as a whole */
};

/* Inodes that mount points take from the writable layer. */
#define SKELETON_INODES 16
/* Inodes that the furniture takes from the writable layer. */
#define FURNITURE_INODES 19
/*
 * Make the furniture, with the request's devices, in a writable layer whose ids are not mapped yet, so that it is
 * root's. Returns 0 or -1.
 */
int furnish(int writable_fd, const struct spawner_request *request);
/* Add the request's devices to what furnish() made, or remove them; what is so already is fine. Returns 0 or -1. */
int change_devices(int writable_fd, const struct spawner_request *request, bool remove);
/* Returns a detached mount of the furniture, or -1. */
int clone_furniture(int writable_fd);
/*
 * Have a detached mount that is needed no more go with the furniture, which the sandbox unmounts with the tiny
 * namespace: whoever closes the last descriptor of a detached mount waits for an RCU grace period, for each one.
 */
void put_with_furniture(int furniture_fd, int mount_fd);

/* Make a sandbox's root from held layers. On failure nothing stays open. */
int mount_root(const struct spawner_request *request, const int *layer_fds, int mapping_fd,
               struct sandbox_mounts *mounts, struct failure *failure);

/* Whether the topmost layer was a writable layer; then `/` and `/tmp` are as they were in it. */
#define BUILDS_ON_SNAPSHOT(request) (((request)->flags & CREATE_ON_SNAPSHOT) != 0)

/*
 * Begin to copy a sandbox's writable layer (none without a slot) and to fold held layers into the copy; a helper
 * process does it. Fills two descriptors: where its result comes, and the copy as a mount.
 */
int snapshot_begin(const struct spawner_request *request, const struct slot *slot, const int *layer_fds,
                   int cgroup_fd, int *reply_fds, struct failure *failure);

/* Size a living sandbox's writable layer; not half done on failure. */
int resize_writable(const struct spawner_request *request, const struct slot *slot, struct failure *failure);

/* Give a living sandbox what it is lent for a while: devices, which are taken back here too, or a mount. */
int lend_to(const struct spawner_request *request, const struct slot *slot, int layer_fd, const int *fds, int count,
            struct failure *failure);

/* The next of some strings that each end with a NUL; NULL when there is no whole one. */
const char *take_text(const char **at, const char *end);

/* How many inodes a request's devices may take: each one, and a directory. */
static inline uint64_t device_inodes(const struct spawner_request *request)
{
    uint64_t count = 0;
    const char *at = request->settings, *end = at + request->settings_bytes;
    while (at < end) {
        count += *at++ == DSEC_SETTING_DEVICE ? 2 : 0;
        (void)take_text(&at, end);
        (void)take_text(&at, end);
    }
    return count;
}

/* How many mounts from the host a sandbox has: its run mount, and in that one the pipes of CUDA's MPS. */
#define EXTRA_MOUNTS(request) \
    (((request)->flags & CREATE_HAS_RUN_MOUNT) ? (((request)->flags & CREATE_HAS_PIPES_MOUNT) ? 2 : 1) : 0)

/* A sandbox's cgroups while it is born. */
struct groups {
    int made;         /* in how many trees there are directories */
    uint32_t written; /* how many limits */
    int directories[DSEC_TREES_MAX];
    int enter[DSEC_TREES_MAX]; /* of v1 trees: what a process writes 0 to, to be in it */
};

/* Make the directories below the node's own, and write the limits. On failure nothing of it is left. */
int groups_make(const struct spawner_request *request, const int *parents, struct groups *groups,
                struct failure *failure);
/* Close the descriptors; the directories stay. */
void groups_close(struct groups *groups);
/* Close the descriptors, and remove the directories that no process is in. */
void groups_remove(const struct spawner_request *request, const int *parents, struct groups *groups);

struct child_plan {
    const struct host *host;
    const struct spawner_request *request;
    int control_fd;   /* the child's end */
    int host_end_fd;
    const int *controller_fds; /* as many as the request has v1 trees */
};

/* A line for the sandbox's own name in its /etc/hosts: in its own root, before anything of it runs. */
void name_in_hosts(const char *hostname, int may_create);

/* The process that becomes the sandbox: never returns. */
_Noreturn void child_main(const struct child_plan *plan);

#endif
