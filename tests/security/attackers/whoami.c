/* Say the effective user id: a set-user-ID file that works would give another. */
#include <stdio.h>
#include <unistd.h>

int main(void)
{
    printf("%u %u\n", getuid(), geteuid());
    return 0;
}
