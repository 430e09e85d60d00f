/*
 * Run a program that wants a path on a mount that has none.
 *
 *   with_mount MOUNT_FD DIRECTORY FILE_BYTES_MAX PROGRAM ARGUMENT...
 *
 * In a mount namespace of its own the mount is seen at DIRECTORY, for the program alone and as long as it runs.
 * Given /proc/self/fd/N instead, mkfs.erofs would ask for its real path, which is "/", and pack the host.
 * No file that it writes becomes larger than FILE_BYTES_MAX.
 */
#include "sys.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static _Noreturn void stop(const char *step)
{
    fprintf(stderr, "with_mount: %s: %s\n", step, strerror(errno));
    _exit(125);
}

int main(int argc, char **argv)
{
    if (argc < 5) {
        fprintf(stderr, "usage: with_mount MOUNT_FD DIRECTORY FILE_BYTES_MAX PROGRAM ARGUMENT...\n");
        return 2;
    }
    int mount_fd = atoi(argv[1]);
    rlim_t most = strtoull(argv[3], NULL, 10);
    struct rlimit file_size = {most, most};

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (setrlimit(RLIMIT_FSIZE, &file_size) < 0)
        stop("limit");
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        stop("mount namespace");
    /* A copy: the mount itself stays where it is, and can still be copied by others. */
    int copy = open_tree(mount_fd, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (copy < 0 || move_mount(copy, "", AT_FDCWD, argv[2], MOVE_MOUNT_F_EMPTY_PATH) < 0)
        stop("mount");
    close(copy);
    close(mount_fd);
    execvp(argv[4], argv + 4);
    stop(argv[4]);
}
