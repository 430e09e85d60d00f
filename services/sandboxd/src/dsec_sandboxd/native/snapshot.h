/* Copying a tree that its owner may have made to harm us: see copytree.c. Only a helper process does this. */
#ifndef DSEC_SNAPSHOT_H
#define DSEC_SNAPSHOT_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

#include "spawner.h"

/* One tree to copy from. */
struct tree_source {
    int root_fd;
    uint32_t base_id; /* the owners that we see are this much above those on disk; 0 for a held layer */
    bool dense;       /* its file system knows no holes: whole pages of zeros become holes */
};

struct tree_copy {
    int links_fd;   /* an empty directory beside the copy: the first name of each file that has several */
    uint64_t entries;
    uint64_t hole_bytes; /* by which the files are larger than what the copy takes for them */
    const volatile sig_atomic_t *expired;
    struct failure *failure;
};

/*
 * Put all of `source` under what `target_fd` holds already: a name that is there hides what the source has at it,
 * as in an overlay. Whiteouts and opaque marks are kept, so that the result hides what both trees hid.
 * Returns 0, or -1 with the failure told; then the target is to be thrown away.
 */
int copy_tree(const struct tree_source *source, int target_fd, bool target_is_fresh, struct tree_copy *copy);

/* copyfile.c: one entry, once its parent is there. All are descriptor-relative and follow no link. */
int copy_regular(const struct tree_source *source, int from_fd, const struct stat *status, int target_directory,
                 const char *name, const struct tree_copy *copy);
int copy_special(const struct tree_source *source, int source_directory, const struct stat *status,
                 int target_directory, const char *name);
/* Owner, mode, attributes and times of an open file or directory. */
int copy_attributes(const struct tree_source *source, int from_fd, const struct stat *status, int to_fd);
bool is_opaque(int directory_fd);
int mark_opaque(int directory_fd);
/*
 * Have overlayfs look for whiteouts when it lists a directory that no other is merged with: it does so where the
 * attribute `origin` is, whatever its value, and would else show them as names.
 */
int mark_whiteouts(int directory_fd);
static inline bool is_whiteout(const struct stat *status)
{
    return S_ISCHR(status->st_mode) && status->st_rdev == 0;
}

#endif
