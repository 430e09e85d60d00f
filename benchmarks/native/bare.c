/* The kernel's own limit: the bare work of creating a sandbox, and nothing else.
 *
 * Each iteration: clone3 with mount, pid, uts, ipc, network and cgroup namespaces, a tmpfs, an overlay over three EROFS layers, /proc,
 * pivot_root, exec of a static init, ready after that exec, one command over a socket, kill, reap.
 * No user namespace with its id maps, no limits, no seccomp, no bus, no log: what a real platform
 * adds is its own cost. A fresh network namespace is half of the work; with --shared-network none is
 * made, which is the limit for a platform that keeps a pool of them.
 *
 *   bare --layers A B C --count N --processes P [--shared-network] [--fork | --alive]
 *
 * With --alive: N sandboxes made by one process, all alive at once; what memory each takes, the kernel's included.
 * With --fork: a sandbox with 1 MiB changed is copied once to a fresh tmpfs, and N children are made that have the
 * copy as one more lower layer, all alive at once; the rate is N over the time from before the copy until the last
 * is ready. Beside it the copy alone (a snapshot), and an end with a birth on the copy (a rollback), one at a time.
 *
 * prints one JSON object. Latencies run from just before clone3, in milliseconds; the rate counts
 * whole iterations, reaping included, over the wall time of all processes.
 *
 * Everything happens in a private mount namespace of four mounts: the host's own mounts would be
 * copied for each sandbox, and nothing can be left behind.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LAYERS = 3, MAXIMUM_COUNT = 1000000, MAXIMUM_PROCESSES = 64, CONTROL = 3 };

struct sample {
	double ready_ms;
	double first_exec_ms;
};

static void die(const char *step)
{
	fprintf(stderr, "bare: %s: %s\n", step, strerror(errno));
	_exit(1);
}

static void check(int result, const char *step)
{
	if (result < 0)
		die(step);
}

static double now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* ---- the private mount namespace --------------------------------------------------------- */

static int mount_layer(const char *image)
{
	int context = (int)syscall(SYS_fsopen, "erofs", 0);
	check(context, "fsopen erofs");
	check((int)syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, "source", image, 0), image);
	check((int)syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0), image);
	int layer = (int)syscall(SYS_fsmount, context, 0, MOUNT_ATTR_RDONLY);
	check(layer, "fsmount erofs");
	close(context);
	return layer;
}

/* Leaves the process at the root of a tmpfs that holds the layers /0 /1 /2 and the empty /t. */
static void make_directories(void)
{
	check(mkdir("t", 0755), "mkdir t");
	check(mkdir("changed", 0755), "mkdir changed");
	check(mkdir("copy", 0755), "mkdir copy");
}

static void enter_private_root(char **images)
{
	check(unshare(CLONE_NEWNS), "unshare mounts");
	check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "make mounts private");
	int layers[LAYERS];
	for (int i = 0; i < LAYERS; i++)
		layers[i] = mount_layer(images[i]);
	check(mount("tmpfs", "/tmp", "tmpfs", 0, "size=1m"), "mount the private root");
	check(chdir("/tmp"), "chdir");
	for (int i = 0; i < LAYERS; i++) {
		char name[2] = {(char)('0' + i), 0};
		check(mkdir(name, 0755), "mkdir layer");
		check((int)syscall(SYS_move_mount, layers[i], "", AT_FDCWD, name,
				   MOVE_MOUNT_F_EMPTY_PATH), "move layer");
		close(layers[i]);
	}
	make_directories();
	check((int)syscall(SYS_pivot_root, ".", "."), "pivot_root to the private root");
	check(umount2(".", MNT_DETACH), "detach the host's root");
	check(chdir("/"), "chdir");
}

/* ---- one sandbox ------------------------------------------------------------------------- */

/* What a sandbox's overlay is made of; children of a fork have the copy on top. */
static const char *overlay_options = "lowerdir=/2:/1:/0,upperdir=/t/u,workdir=/t/w";

static void become_sandbox(int control, int init)
{
	check(mount("tmpfs", "/t", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m"), "mount tmpfs");
	check(mkdir("/t/u", 0755), "mkdir upper");
	check(mkdir("/t/w", 0755), "mkdir work");
	check(mkdir("/t/r", 0755), "mkdir root");
	check(mount("overlay", "/t/r", "overlay", MS_NOSUID | MS_NODEV,
		    overlay_options), "mount overlay");
	check(chdir("/t/r"), "chdir to the root");
	check(mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "mount proc");
	check((int)syscall(SYS_pivot_root, ".", "."), "pivot_root");
	check(umount2(".", MNT_DETACH), "detach");
	check(dup2(control, CONTROL), "dup2");
	char *arguments[] = {"init", NULL};
	char *environment[] = {NULL};
	syscall(SYS_execveat, init, "", arguments, environment, AT_EMPTY_PATH);
	die("exec init");
}

struct living {
	pid_t child;
	int pidfd;
	int control;
};

static struct living make_sandbox(int init, uint64_t namespaces)
{
	struct living living = {.pidfd = -1};
	int control[2];
	unsigned char byte = 0;

	check(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control), "socketpair");
	struct clone_args arguments = {
		.flags = namespaces | CLONE_PIDFD,
		.pidfd = (uint64_t)(uintptr_t)&living.pidfd,
		.exit_signal = SIGCHLD,
	};
	living.child = (pid_t)syscall(SYS_clone3, &arguments, sizeof(arguments));
	check(living.child, "clone3");
	if (living.child == 0)
		become_sandbox(control[1], init);
	close(control[1]);
	living.control = control[0];
	if (recv(control[0], &byte, 1, 0) != 1 || byte != 'r')
		die("wait for the init");
	return living;
}

static void end_sandbox(struct living living)
{
	check((int)syscall(SYS_pidfd_send_signal, living.pidfd, SIGKILL, NULL, 0), "kill");
	check(waitpid(living.child, NULL, 0), "reap");
	close(living.pidfd);
	close(living.control);
}

static struct sample run_sandbox(int init, uint64_t namespaces)
{
	struct sample sample;
	unsigned char byte = 0;
	double start_ms = now_ms();
	struct living living = make_sandbox(init, namespaces);

	sample.ready_ms = now_ms() - start_ms;
	if (send(living.control, "x", 1, 0) != 1 || recv(living.control, &byte, 1, 0) != 1 || byte != 0)
		die("run the command");
	sample.first_exec_ms = now_ms() - start_ms;
	end_sandbox(living);
	return sample;
}

/* ---- forks ------------------------------------------------------------------------------- */

enum { FILES = 16, FILE_BYTES = 65536, COPIES = 100 };

static void write_changes(void)
{
	static char content[FILE_BYTES];
	check(mount("tmpfs", "/changed", "tmpfs", 0, "size=64m"), "mount the changes");
	for (int i = 0; i < FILES; i++) {
		char path[32];
		snprintf(path, sizeof(path), "/changed/%d", i);
		int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
		check(file, path);
		memset(content, i + 1, sizeof(content));
		if (write(file, content, sizeof(content)) != FILE_BYTES)
			die(path);
		close(file);
	}
}

static void copy_changes(void)
{
	static char content[FILE_BYTES];
	check(mount("tmpfs", "/copy", "tmpfs", 0, "size=64m"), "mount the copy");
	for (int i = 0; i < FILES; i++) {
		char path[32];
		snprintf(path, sizeof(path), "/changed/%d", i);
		int from = open(path, O_RDONLY | O_CLOEXEC);
		snprintf(path, sizeof(path), "/copy/%d", i);
		int to = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
		check(from, "open a change");
		check(to, path);
		if (read(from, content, sizeof(content)) != FILE_BYTES ||
		    write(to, content, sizeof(content)) != FILE_BYTES)
			die(path);
		close(from);
		close(to);
	}
}

static double median_of(double *values, int count);

/* Makes this worker's share of children, tells that they are ready, and ends them when told to. */
static void make_children(int init, uint64_t namespaces, int share, int ready, int end)
{
	struct living *children = calloc((size_t)share, sizeof(*children));
	char byte = 0;
	if (children == NULL)
		die("allocate");
	for (int i = 0; i < share; i++)
		children[i] = make_sandbox(init, namespaces);
	if (write(ready, &byte, 1) != 1)
		die("tell that all are ready");
	if (read(end, &byte, 1) < 0)
		die("wait for the end");
	for (int i = 0; i < share; i++)
		end_sandbox(children[i]);
	_exit(0);
}

static double fork_rate(int init, uint64_t namespaces, int count, int processes)
{
	int ready[2], end[2];
	char byte;
	check(pipe(ready), "pipe");
	check(pipe(end), "pipe");
	double start_ms = now_ms();
	copy_changes();
	for (int worker = 0; worker < processes; worker++) {
		pid_t child = fork();
		check(child, "fork");
		if (child == 0) {
			check(prctl(PR_SET_PDEATHSIG, SIGKILL), "prctl");
			close(end[1]);
			make_children(init, namespaces, count / processes, ready[1], end[0]);
		}
	}
	for (int worker = 0; worker < processes; worker++)
		if (read(ready[0], &byte, 1) != 1)
			die("wait for the children");
	double wall_ms = now_ms() - start_ms;
	close(end[1]);
	for (int worker = 0; worker < processes; worker++)
		check(wait(NULL), "wait");
	check(umount2("/copy", MNT_DETACH), "unmount the copy");
	return count / (wall_ms / 1e3);
}

static void measure_forks(int init, uint64_t namespaces, int count, int processes)
{
	double copies[COPIES], rollbacks[COPIES];
	write_changes();
	for (int i = 0; i < COPIES; i++) {
		double start_ms = now_ms();
		copy_changes();
		copies[i] = now_ms() - start_ms;
		check(umount2("/copy", MNT_DETACH), "unmount the copy");
	}
	overlay_options = "lowerdir=/copy:/2:/1:/0,upperdir=/t/u,workdir=/t/w";
	copy_changes();
	struct living living = make_sandbox(init, namespaces);
	for (int i = 0; i < COPIES; i++) {
		double start_ms = now_ms();
		end_sandbox(living);
		living = make_sandbox(init, namespaces);
		rollbacks[i] = now_ms() - start_ms;
	}
	end_sandbox(living);
	check(umount2("/copy", MNT_DETACH), "unmount the copy");
	printf("{\"count\": %d, \"processes\": %d, \"snapshot_p50_ms\": %.4f, "
	       "\"rollback_p50_ms\": %.4f, \"fork_rate_per_s\": %.2f}\n",
	       count, processes, median_of(copies, COPIES), median_of(rollbacks, COPIES),
	       fork_rate(init, namespaces, count, processes));
}

/* ---- density ------------------------------------------------------------------------------ */

/* Opened while the host's root is still there: later no path leads to it. */
static int meminfo = -1;

static double available_bytes(void)
{
	char text[4096];
	ssize_t length = pread(meminfo, text, sizeof(text) - 1, 0);
	check((int)length, "read meminfo");
	text[length] = 0;
	char *found = strstr(text, "MemAvailable:");
	if (found == NULL)
		die("find MemAvailable");
	return strtod(found + strlen("MemAvailable:"), NULL) * 1024;
}

/* All alive at once, made by one process; each answers a command before the memory is counted. */
static void measure_alive(int init, uint64_t namespaces, int count)
{
	struct living *children = calloc((size_t)count, sizeof(*children));
	struct rlimit files;
	unsigned char byte = 0;
	if (children == NULL)
		die("allocate");
	check(getrlimit(RLIMIT_NOFILE, &files), "getrlimit");
	files.rlim_cur = files.rlim_max;
	check(setrlimit(RLIMIT_NOFILE, &files), "setrlimit");
	double before = available_bytes();
	for (int i = 0; i < count; i++) {
		children[i] = make_sandbox(init, namespaces);
		if (send(children[i].control, "x", 1, 0) != 1 ||
		    recv(children[i].control, &byte, 1, 0) != 1 || byte != 0)
			die("run the command");
	}
	double each = (before - available_bytes()) / count;
	for (int i = 0; i < count; i++)
		end_sandbox(children[i]);
	free(children);
	printf("{\"count\": %d, \"bytes_each\": %.0f}\n", count, each);
}

/* ---- figures ----------------------------------------------------------------------------- */

static int by_value(const void *left, const void *right)
{
	double difference = *(const double *)left - *(const double *)right;
	return (difference > 0) - (difference < 0);
}

static double percentile(const double *sorted, int count, double part)
{
	int index = (int)(part * count);
	return sorted[index < count ? index : count - 1];
}

static double median_of(double *values, int count)
{
	qsort(values, (size_t)count, sizeof(*values), by_value);
	return percentile(values, count, 0.5);
}

static void print_figures(const struct sample *samples, int count, int processes, double wall_ms)
{
	double *ready = calloc((size_t)count, sizeof(*ready));
	double *first_exec = calloc((size_t)count, sizeof(*first_exec));
	if (ready == NULL || first_exec == NULL)
		die("allocate");
	for (int i = 0; i < count; i++) {
		ready[i] = samples[i].ready_ms;
		first_exec[i] = samples[i].first_exec_ms;
	}
	qsort(ready, (size_t)count, sizeof(*ready), by_value);
	qsort(first_exec, (size_t)count, sizeof(*first_exec), by_value);
	printf("{\"count\": %d, \"processes\": %d, "
	       "\"create_to_ready_p50_ms\": %.4f, \"create_to_ready_p99_ms\": %.4f, "
	       "\"create_to_first_exec_p50_ms\": %.4f, \"create_to_first_exec_p99_ms\": %.4f, "
	       "\"rate_per_s\": %.2f}\n",
	       count, processes, percentile(ready, count, 0.5), percentile(ready, count, 0.99),
	       percentile(first_exec, count, 0.5), percentile(first_exec, count, 0.99),
	       count / (wall_ms / 1e3));
	free(ready);
	free(first_exec);
}

static int usage(void)
{
	fprintf(stderr, "usage: bare --layers A B C --count N --processes P [--shared-network] [--fork | --alive]\n"
			"  A B C  EROFS images, lowest first; the first holds /bin/true and /proc\n");
	return 2;
}

static int number(const char *text, int maximum)
{
	char *end;
	long value = text == NULL ? 0 : strtol(text, &end, 10);
	return value < 1 || value > maximum || *end != 0 ? 0 : (int)value;
}

/* Opens the init that was built beside this program, before the host's root is gone. */
static int open_init(void)
{
	char path[PATH_MAX];
	ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - sizeof("-init"));
	check((int)length, "find this program");
	memcpy(path + length, "-init", sizeof("-init"));
	int opened = open(path, O_PATH | O_CLOEXEC);
	check(opened, path);
	int init = fcntl(opened, F_DUPFD_CLOEXEC, CONTROL + 1); /* CONTROL is the sandbox's socket */
	check(init, "move the init's descriptor");
	close(opened);
	return init;
}

int main(int argc, char **argv)
{
	char **layers = NULL;
	int count = 0;
	int processes = 0;
	int forks = 0;
	int alive = 0;
	uint64_t namespaces = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC |
			      CLONE_NEWNET | CLONE_NEWCGROUP;
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--layers") == 0 && i + LAYERS < argc) {
			layers = argv + i + 1;
			i += LAYERS;
		} else if (strcmp(argv[i], "--count") == 0) {
			count = number(argv[++i], MAXIMUM_COUNT);
		} else if (strcmp(argv[i], "--processes") == 0) {
			processes = number(argv[++i], MAXIMUM_PROCESSES);
		} else if (strcmp(argv[i], "--shared-network") == 0) {
			namespaces &= ~(uint64_t)CLONE_NEWNET;
		} else if (strcmp(argv[i], "--fork") == 0) {
			forks = 1;
		} else if (strcmp(argv[i], "--alive") == 0) {
			alive = 1;
		} else {
			return usage();
		}
	}
	if (layers == NULL || count < processes || processes == 0)
		return usage();

	int init = open_init();
	meminfo = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
	check(meminfo, "open meminfo");
	enter_private_root(layers);
	count -= count % processes;
	if (forks) {
		measure_forks(init, namespaces, count, processes);
		return 0;
	}
	if (alive) {
		measure_alive(init, namespaces, count);
		return 0;
	}
	struct sample *samples = mmap(NULL, sizeof(*samples) * (size_t)count, PROT_READ | PROT_WRITE,
				      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (samples == MAP_FAILED)
		die("map the samples");

	int share = count / processes;
	double start_ms = now_ms();
	for (int worker = 0; worker < processes; worker++) {
		pid_t child = fork();
		check(child, "fork");
		if (child == 0) {
			check(prctl(PR_SET_PDEATHSIG, SIGKILL), "prctl");
			for (int i = 0; i < share; i++)
				samples[worker * share + i] = run_sandbox(init, namespaces);
			_exit(0);
		}
	}
	for (int worker = 0; worker < processes; worker++) {
		int status;
		check(wait(&status), "wait");
		if (status != 0) {
			fprintf(stderr, "bare: a process failed\n");
			return 1;
		}
	}
	print_figures(samples, count, processes, now_ms() - start_ms);
	return 0;
}
