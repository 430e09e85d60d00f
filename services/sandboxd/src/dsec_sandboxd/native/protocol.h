/*
 * What the daemon, the spawner and PID 1 say to each other: fixed structures over SOCK_SEQPACKET,
 * descriptors beside them by SCM_RIGHTS. The Python side is kernel/protocol.py; a test compares the two.
 * All numbers are of the host's byte order: both ends are always the same machine.
 */
#ifndef DSEC_PROTOCOL_H
#define DSEC_PROTOCOL_H

#include <stdint.h>

/* Every operation that can fail, so that a failure names the one that did. */
#define DSEC_STEPS(X) \
    X(NONE) X(PROTOCOL) X(NAMESPACE_TREE) X(LAYER_MOUNT) X(SLOT_USER_NAMESPACE) \
    X(SLOT_NETWORK_NAMESPACE) X(ENTER_NETWORK_NAMESPACE) X(CONTROL_SOCKET) X(CLONE) X(ID_MAP) X(OOM_SCORE) \
    X(WRITABLE_LAYER) X(LAYER_CLONE) X(LAYER_ID_MAP) X(OVERLAY) X(HANDSHAKE) X(CGROUP_ENTER) \
    X(CGROUP_NAMESPACE) X(IDENTITY) X(HOSTNAME) X(ROOT_MOUNT) X(PROC_MOUNT) X(PROC_MASK) X(DEV_MOUNT) \
    X(PTS_MOUNT) X(SHM_MOUNT) X(RUN_MOUNT) X(PIVOT_ROOT) X(RESOURCE_LIMITS) X(CAPABILITIES) \
    X(NO_NEW_PRIVILEGES) X(SECCOMP) X(EXEC_INIT) X(LANDLOCK) X(MEMORY) X(PIPES) X(COMMAND_FORK) \
    X(COMMAND_USER) X(COMMAND_DIRECTORY) X(COMMAND_SECCOMP) X(COMMAND_EXEC) X(FILE_FORK) X(FILE_USER) \
    X(FILE_OPEN) X(FILE_KIND) X(FILE_STAT) X(FILE_LIST) X(FILE_MKDIR) X(FILE_RENAME) X(FILE_UNLINK) \
    X(FILE_CHILD_DIED)

enum dsec_step {
#define DSEC_STEP_MEMBER(name) STEP_##name,
    DSEC_STEPS(DSEC_STEP_MEMBER)
#undef DSEC_STEP_MEMBER
    STEP_COUNT
};

/* ---- daemon <-> spawner ---- */

#define DSEC_LAYERS_MAX 16
#define DSEC_LAYER_HANDLES 4096
#define DSEC_SLOTS_MAX 4096
#define DSEC_CONTROLLERS_MAX 8
#define DSEC_HOSTNAME_MAX 64
#define DSEC_DESCRIPTORS_MAX 16

enum spawner_request_kind {
    SPAWNER_HOLD = 1, /* descriptors: the image file */
    SPAWNER_DROP = 2,
    SPAWNER_WARM = 3,    /* make a slot's namespaces ahead of need */
    SPAWNER_CREATE = 4,  /* descriptors: v2 directory, v1 tasks files, the detached run mount */
    SPAWNER_RELEASE = 5, /* the slot's sandbox is dead: let go of its writable layer */
};

enum spawner_create_flags {
    CREATE_HAS_RUN_MOUNT = 1,
};

struct spawner_request {
    uint32_t kind;
    uint32_t request_id;
    uint32_t slot;
    uint32_t base_id;
    uint32_t layer; /* the handle, for HOLD and DROP */
    uint32_t layer_count;
    uint32_t layers[DSEC_LAYERS_MAX]; /* handles, lowest first */
    uint32_t controller_count;        /* how many v1 tasks descriptors follow the v2 directory */
    uint32_t flags;
    uint64_t disk_bytes;
    uint64_t inodes;
    char hostname[DSEC_HOSTNAME_MAX];
};

/* With error 0, CREATE's reply carries the pidfd and the host end of the control socket. */
struct spawner_reply {
    uint32_t kind;
    uint32_t request_id;
    int32_t error; /* errno, or 0 */
    uint32_t step;
    int32_t pid;
    uint32_t reserved;
};

/* ---- daemon <-> PID 1 ---- */

/* PID 1 keeps both ends of its control socket here, so that a later daemon can take one. */
#define DSEC_CONTROL_FD 3
#define DSEC_HOST_END_FD 4

#define DSEC_COMMANDS_MAX 256
/* Payloads above this travel in a memfd. */
#define DSEC_INLINE_PAYLOAD_MAX 61440
#define DSEC_PAYLOAD_MAX (8u << 20)
#define DSEC_STRINGS_MAX 65536
#define DSEC_LIST_NAMES_MAX 10000

enum control_request_kind {
    CONTROL_EXEC = 1,   /* descriptors: [cgroup directory], [payload memfd] */
    CONTROL_SIGNAL = 2, /* descriptors: cgroup directory */
    CONTROL_DONE = 3,   /* the output is read; discard what comes later */
    CONTROL_FILE = 4,   /* descriptors: [payload memfd] */
};

enum control_flags {
    CONTROL_WITH_STDIN = 1,
    CONTROL_MERGE_STDERR = 2,
    CONTROL_WITH_CGROUP = 4,
    CONTROL_PAYLOAD_IN_FD = 8,
};

enum file_operation {
    FILE_OPEN_READ = 1,
    FILE_OPEN_WRITE = 2,
    FILE_OPEN_APPEND = 3,
    FILE_OPEN_CREATE = 4,
    FILE_STAT = 5,
    FILE_LIST = 6,
    FILE_MKDIR = 7,
    FILE_MKDIR_PARENTS = 8,
    FILE_RENAME = 9,
    FILE_UNLINK = 10,
};

/*
 * Followed by payload_bytes of NUL-terminated strings.
 *   EXEC: user, working directory, argument_count arguments, environment_count NAME=VALUE.
 *   FILE: user, path, [target path].
 */
struct control_request {
    uint32_t kind;
    uint32_t id; /* chosen by the daemon, unique among the living */
    uint32_t flags;
    uint32_t argument_count;
    uint32_t environment_count;
    uint32_t signal;
    uint32_t operation;
    uint32_t mode;
    uint32_t payload_bytes;
    uint32_t reserved;
};

enum control_reply_kind {
    CONTROL_READY = 1,    /* PID 1 runs; sent once */
    CONTROL_BROKEN = 2,   /* creation failed before PID 1 ran: step and error */
    CONTROL_STARTED = 3,  /* descriptors: [stdin], stdout, [stderr] */
    CONTROL_FAILED = 4,   /* the command never ran: step and error */
    CONTROL_EXITED = 5,   /* status is a wait status */
    CONTROL_FILE_DONE = 6 /* descriptors: the file, or a memfd of names */
};

struct control_reply {
    uint32_t kind;
    uint32_t id;
    int32_t error;
    uint32_t step;
    int32_t status; /* EXITED: wait status; STARTED: the pid inside */
    uint32_t file_mode;
    uint32_t user_id;
    uint32_t group_id;
    uint64_t size_bytes;
    int64_t modified_ns;
};

#endif
