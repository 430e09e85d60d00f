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
    X(FILE_CHILD_DIED) X(SCHEDULING) \
    X(FILE_PUT) X(FILE_REMOVE) X(FILE_UNPACK) X(FILE_PACK) X(FILE_WATCH) \
    X(COMMAND_SLOT) X(COMMAND_TERMINAL) \
    X(SNAPSHOT_ROOM) X(SNAPSHOT_HELPER) X(SNAPSHOT_FREEZE) X(SNAPSHOT_COPY) \
    X(FILE_COPY) X(CGROUP_MAKE) X(CGROUP_LIMIT)

enum dsec_step {
#define DSEC_STEP_MEMBER(name) STEP_##name,
    DSEC_STEPS(DSEC_STEP_MEMBER)
#undef DSEC_STEP_MEMBER
    STEP_COUNT
};

/* ---- daemon <-> spawner ---- */

/* Changes with anything in this part: the first packet says it, and a daemon refuses another one's spawner. */
#define DSEC_SPAWNER_PROTOCOL 2

#define DSEC_LAYERS_MAX 16
#define DSEC_LAYER_HANDLES 4096
#define DSEC_SLOTS_MAX 4096
#define DSEC_CONTROLLERS_MAX 7
#define DSEC_TREES_MAX (1 + DSEC_CONTROLLERS_MAX)
#define DSEC_HOSTNAME_MAX 64
#define DSEC_CGROUP_NAME_MAX 80
#define DSEC_SETTINGS_MAX 1024
#define DSEC_DESCRIPTORS_MAX 16

enum spawner_request_kind {
    SPAWNER_HOLD = 1, /* descriptors: the image file */
    SPAWNER_DROP = 2,
    SPAWNER_WARM = 3,    /* make a slot's namespaces ahead of need */
    SPAWNER_CREATE = 4,  /* descriptors: the node's directory in the v2 tree and each v1 tree; run mount; pipes mount */
    SPAWNER_RELEASE = 5, /* the slot's sandbox is dead: let go of its writable layer */
    SPAWNER_ADOPT = 6,   /* a sandbox that another spawner made; descriptors: writable layer, network namespace */
    SPAWNER_SNAPSHOT = 7, /* copy a writable layer; descriptors: v2 directory. Or fold held layers; none */
    SPAWNER_RESIZE = 8,   /* size the writable layer of a sandbox that was made ahead of need */
    SPAWNER_LEND = 9,     /* to a living sandbox. Descriptors for a mount: PID 1's pidfd, the place on the host, a mount */
};

enum spawner_create_flags {
    CREATE_HAS_RUN_MOUNT = 1,
    CREATE_BEST_EFFORT = 2,     /* SCHED_IDLE from the first instruction on */
    CREATE_CORE_SCHEDULING = 4, /* a core scheduling cookie of its own */
    CREATE_ON_SNAPSHOT = 8,     /* the topmost layer was a sandbox's writable layer */
    CREATE_HAS_PIPES_MOUNT = 16, /* for /run/dsec/mps, in the run mount */
};

/* In place of a tree's number in the settings: a device, its name in /dev and `major:minor`. */
#define DSEC_SETTING_DEVICE 127
/* Likewise: where in the sandbox a mount is lent, an absolute path, and an empty text. */
#define DSEC_SETTING_PATH 126

enum spawner_lend_flags { /* one of them */
    LEND_DEVICES = 1, /* those of the settings */
    TAKE_DEVICES = 2,
    LEND_LAYER = 3,  /* a held layer, read-only */
    LEND_VOLUME = 4, /* a new tmpfs of disk_bytes and inodes */
    LEND_GIVEN = 5,  /* the mount that the last descriptor is */
};

enum spawner_hold_flags {
    HOLD_IS_MOUNT = 1, /* the descriptor is no image but a mount, which is held as it is */
};

struct spawner_request {
    uint32_t kind;
    uint32_t request_id;
    uint32_t slot;
    uint32_t base_id;
    uint32_t layer; /* the handle, for HOLD and DROP */
    uint32_t layer_count;
    uint32_t layers[DSEC_LAYERS_MAX]; /* handles, lowest first; for SNAPSHOT what to fold in, topmost first */
    uint32_t controller_count;        /* how many v1 trees follow the v2 tree */
    uint32_t flags;
    uint64_t disk_bytes; /* of the writable layer; for SNAPSHOT the most that the copy may take */
    uint64_t inodes;
    char hostname[DSEC_HOSTNAME_MAX];
    char cgroup[DSEC_CGROUP_NAME_MAX]; /* what the sandbox's directory is called in every tree */
    /* For each limit the tree's number in a byte, the file's name and its text, either ending with a NUL; devices. */
    uint32_t settings_bytes;
    char settings[DSEC_SETTINGS_MAX];
    uint32_t reserved; /* fills up to the alignment */
};

/*
 * With error 0, CREATE's reply carries the pidfd and the host end of the control socket, SNAPSHOT's the socket that
 * one snapshot_result comes on and the copy as a mount. A result that never comes, but the end of the stream, means
 * that the helper was killed: then the sandbox may be frozen still.
 */
struct spawner_reply {
    uint32_t kind;
    uint32_t request_id;
    int32_t error; /* errno, or 0 */
    uint32_t step;
    int32_t pid;
    uint32_t detail; /* with CGROUP_LIMIT: the number of the limit, from 0; of the first: DSEC_SPAWNER_PROTOCOL */
};

struct snapshot_result {
    int32_t error; /* errno, or 0 */
    uint32_t step;
    uint64_t bytes; /* what the copy takes */
    uint64_t inodes;
    uint64_t entries;        /* names looked at */
    uint64_t hole_bytes;     /* in the copy's files */
    uint64_t frozen_us;
    uint64_t total_us;
};

/* ---- daemon <-> PID 1 ---- */

/*
 * Changes with anything in this part: a daemon ends the sandboxes of an earlier one whose PID 1 it would not
 * understand. What is merely added, so that an earlier PID 1 is never asked for it, needs no other number.
 */
#define DSEC_CONTROL_PROTOCOL 1

/* PID 1 keeps both ends of its control socket here, so that a later daemon can take one. */
#define DSEC_CONTROL_FD 3
#define DSEC_HOST_END_FD 4
/* And the whole of its writable layer here, so that a later spawner can take it. */
#define DSEC_WRITABLE_FD 5

#define DSEC_COMMANDS_MAX 1100
/* Payloads above this travel in a memfd. */
#define DSEC_INLINE_PAYLOAD_MAX 61440
/* What a held command printed, both streams together, comes with its end if it is no more than this. */
#define DSEC_INLINE_OUTPUT_MAX 32768
#define DSEC_PAYLOAD_MAX (8u << 20)
#define DSEC_STRINGS_MAX 65536
#define DSEC_LIST_NAMES_MAX 10000
#define DSEC_WATCHES_MAX 8192

enum control_request_kind {
    CONTROL_EXEC = 1,   /* descriptors: [cgroup directory], [payload memfd], [input spool] */
    CONTROL_SIGNAL = 2, /* descriptors: cgroup directory */
    CONTROL_DONE = 3,   /* the output is read; discard what comes later */
    CONTROL_FILE = 4,   /* descriptors: [payload memfd] */
    CONTROL_LIST = 5,   /* tell of every command, with its descriptors */
    CONTROL_CLOSE_STDIN = 6,
};

enum control_flags {
    CONTROL_WITH_STDIN = 1,
    CONTROL_MERGE_STDERR = 2,
    CONTROL_WITH_CGROUP = 4,
    CONTROL_PAYLOAD_IN_FD = 8,
    CONTROL_KEEP_STDIN = 16, /* EXEC: keep the input's end and spool for a later daemon */
    CONTROL_TERMINAL = 32,   /* EXEC: on a terminal of rows << 16 | columns in mode */
    CONTROL_MAIN_ONLY = 64,  /* SIGNAL: only the command's main process */
    CONTROL_SPARE_MAIN = 128, /* SIGNAL: all but the main process */
    CONTROL_HOLD = 256,       /* EXEC without input: STARTED only if it lasts, or prints much */
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
    FILE_PUT = 11,    /* a file that appears whole, or never */
    FILE_REMOVE = 12, /* a tree, for a bounded time */
    FILE_UNPACK = 13, /* a tar stream into a directory */
    FILE_PACK = 14,   /* a directory into a tar stream */
    FILE_WATCH = 15,
    FILE_COPY = 16,   /* a file or a tree to a new name */
};

/*
 * Followed by payload_bytes of NUL-terminated strings.
 *   EXEC: user, working directory, argument_count arguments, environment_count NAME=VALUE.
 *   FILE: user, path, [target path of RENAME and COPY, last name of the page before of LIST].
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
    uint32_t directory; /* EXEC: the daemon's name for the cgroup */
};

/* What the mode of a file request says beside permission bits. */
enum file_mode_flags {
    FILE_MODE_PARENTS = 1 << 16,   /* PUT: make missing directories above it */
    FILE_MODE_KEEP = 1 << 17,      /* RENAME: an existing target is an error */
    FILE_MODE_SET_ID = 1 << 18,    /* UNPACK: keep set-id and sticky bits */
    FILE_MODE_RECURSIVE = 1 << 19, /* WATCH: directories below, too */
};

/*
 * PUT, UNPACK, PACK, WATCH and COPY go on after their reply: its first descriptor is a stream socket to the child.
 * From the child come frames, each a length and that many bytes; the last one is a file_result, marked in
 * its length, followed by the path it is about. A stream that ends without one was cut short.
 */
#define DSEC_FRAME_BYTES_MAX 65536
#define DSEC_FRAME_RESULT 0x80000000u

struct file_result {
    int32_t error;
    uint32_t step;
    uint64_t entries;
    uint64_t bytes;
};

/* One name of a LIST, in its memfd; followed by the name, and by where it leads if it is a link. */
struct list_entry {
    uint32_t mode; /* 0: it could not be looked at */
    uint32_t user_id;
    uint32_t group_id;
    uint32_t name_bytes;
    uint64_t size_bytes;
    int64_t modified_ns;
    uint32_t target_bytes;
    uint32_t reserved;
};

/* One change under a watched path, followed by its path below it. */
struct watch_event {
    uint32_t mask; /* of inotify */
    uint32_t cookie;
};

/* What the daemon sends to have a PUT take its place: permission bits, for a new file. */
struct put_commit {
    uint32_t mode;
};

#define PUT_CHANGE_MODE (1 << 16) /* a file that is there gets the mode, too; otherwise it keeps its own */

enum control_reply_kind {
    CONTROL_READY = 1,    /* PID 1 runs; sent once */
    CONTROL_BROKEN = 2,   /* creation failed before PID 1 ran: step and error */
    CONTROL_STARTED = 3,  /* descriptors: [stdin], stdout, [stderr]; or a terminal's master, relay ends */
    CONTROL_FAILED = 4,   /* the command never ran: step and error */
    CONTROL_EXITED = 5,   /* status is a wait status; EXITED_WHOLE: followed by what it printed */
    CONTROL_FILE_DONE = 6, /* descriptors: the file, or a memfd of names */
    CONTROL_LISTED = 7,    /* one command; descriptors as of STARTED, [spool] */
    CONTROL_LIST_ENDED = 8,
};

/* In file_mode of EXITED; with EXITED_WHOLE user_id and group_id are the sizes of output and error. */
enum exited_flags {
    EXITED_WHOLE = 1, /* a held command: there was no STARTED, and PID 1 has forgotten it */
    EXITED_ALONE = 2, /* no process is left in the sandbox but PID 1 */
};

/* In file_mode of LISTED, whose status is a wait status, user_id the directory and group_id the pid. */
enum listed_flags {
    LISTED_EXITED = 1,
    LISTED_WITH_STREAMS = 2,
    LISTED_WITH_STDIN = 4,
    LISTED_WITH_SPOOL = 8,
    LISTED_TERMINAL = 16,
    LISTED_HELD = 32, /* it was held, and whoever is told of its start notes that before it reads */
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
