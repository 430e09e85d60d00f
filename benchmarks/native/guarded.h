/* What both halves of `guarded` need: the parts of a child that are made once, and calls that end the program. */
#ifndef GUARDED_H
#define GUARDED_H

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LAYERS = 3, MOUNTS = 4, TREES = 4, CONTROL = 3, LONG_LIVED = 1000, MAXIMUM_COUNT = 4000, FILES = 16,
       FILE_BYTES = 65536, REMOVE_ATTEMPTS = 2000 };
/* Above the ids that daemons on this host give away. */
#define FIRST_ID 0xE2000000U
#define INTO_CGROUP 0x200000000ULL

struct clone3_arguments {
	uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size,
		cgroup;
};

/* What is kept for a child that is to come: a user namespace that maps mounts, a network namespace. */
struct pooled {
	int mapping, network;
};

/* A child that is ready. */
struct living {
	pid_t pid;
	int pidfd, control, writable;
};

/* Set before the first child is made. */
struct kit {
	int trees[TREES]; /* v2, then memory, cpu and pids of v1; -1 where there is none */
	int layers[LAYERS + 1], layer_count, init_fd, own_network;
	struct sock_fprog filter;
	struct pooled *pool;
};
extern struct kit kit;

struct living make_child(int number);
void end_child(struct living living, int number);

static inline _Noreturn void die(const char *step)
{
	fprintf(stderr, "guarded: %s: %s\n", step, strerror(errno));
	_exit(1);
}

static inline int check(long result, const char *step)
{
	if (result < 0)
		die(step);
	return (int)result;
}

static inline int keep(int fd, const char *step)
{
	int kept = check(fcntl(check(fd, step), F_DUPFD_CLOEXEC, LONG_LIVED), step);
	close(fd);
	return kept;
}

static inline void write_at(int directory, const char *path, const char *text)
{
	int fd = check(openat(directory, path, O_WRONLY | O_CLOEXEC), path);
	check(write(fd, text, strlen(text)), path);
	close(fd);
}

static inline int mount_new(const char *type, const char *const (*options)[2], int count, unsigned attributes)
{
	int context = check(fsopen(type, FSOPEN_CLOEXEC), type);
	for (int i = 0; i < count; i++)
		check(fsconfig(context, FSCONFIG_SET_STRING, options[i][0], options[i][1], 0), options[i][0]);
	check(fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0), type);
	int mounted = check(fsmount(context, FSMOUNT_CLOEXEC, attributes), type);
	close(context);
	return mounted;
}

static inline int mount_tmpfs(const char *size)
{
	const char *const options[][2] = {{"mode", "0755"}, {"size", size}, {"nr_inodes", "65536"}};
	return mount_new("tmpfs", options, 3, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
}

static inline void set_attributes(int mounted, unsigned set, unsigned clear, int mapping)
{
	struct mount_attr attributes = {.attr_set = set, .attr_clr = clear, .userns_fd = (uint64_t)mapping};
	check(mount_setattr(mounted, "", AT_EMPTY_PATH, &attributes, sizeof attributes), "mount_setattr");
}

static inline int clone_tree(int directory, const char *path)
{
	return check(open_tree(directory, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH), path);
}

static inline void place(int mounted, const char *path)
{
	check(move_mount(mounted, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH), path);
	close(mounted);
}

static inline void write_maps(pid_t pid, const char *map)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
	write_at(AT_FDCWD, path, map);
	snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
	write_at(AT_FDCWD, path, map);
}

static inline uint32_t base_of(int number)
{
	return FIRST_ID + (uint32_t)number * 65536;
}

#endif
