/* Tests the counters of a volume, which the frozen header lacks. Prints `passed`. */
#include <errno.h>
#include <rtrs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct rtrs_stats) == 184, "size of the ABI");

/* Size of the structure in the first version of the header. */
#define FIRST_SIZE 176

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, rtrs_error_message()); \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

int main(int argc, char **argv)
{
    static char data[8192];
    struct rtrs_completion done;
    struct rtrs_stats stats;
    uint64_t longer[32];
    rtrs_volume *volume;
    rtrs_queue *queue;

    CHECK(argc == 2 && rtrs_open_uri(argv[1], &volume) == 0);
    CHECK(rtrs_get_queue(volume, 0, &queue) == 0);
    CHECK(rtrs_get_stats(volume, &stats, 8) == -EINVAL);
    stats.bounced = 7;
    CHECK(rtrs_get_stats(volume, &stats, FIRST_SIZE) == 0);
    CHECK(stats.paths == 1 && stats.bounced == 7);
    memset(longer, 0xee, sizeof longer);
    CHECK(rtrs_get_stats(volume, (struct rtrs_stats *)longer, sizeof longer) == 0);
    CHECK(longer[sizeof stats / 8 - 1] == 0 && longer[sizeof longer / 8 - 1] == 0);
    CHECK(rtrs_get_stats(volume, &stats, sizeof stats) == 0);
    CHECK(stats.write.count == 0 && stats.paths == 1 && stats.paths_connected == 1);
    for (int round = 0; round < 3; round++)
        CHECK(rtrs_pwrite(queue, data, sizeof data, 0) == 0);
    CHECK(rtrs_pread(queue, data, 4096, 0) == 0 && rtrs_flush(queue) == 0);
    /* The offset is past the end of the volume. */
    CHECK(rtrs_submit_read(queue, data, 4096, (uint64_t)1 << 40, 0, NULL) == 0);
    CHECK(rtrs_poll(queue, 1, 1, 60000, &done) == 1 && done.result < 0);
    CHECK(rtrs_get_stats(volume, &stats, sizeof stats) == 0);
    CHECK(stats.write.count == 3 && stats.write.bytes == 3 * sizeof data);
    CHECK(stats.read.bytes == 4096 && stats.flush.count == 1 && stats.inflight == 0);
    CHECK(stats.read.count == 2 && stats.read.errors == 1 && stats.failovers == 0);
    CHECK(rtrs_close(volume, 10000) == 0);
    CHECK(rtrs_get_stats(volume, &stats, sizeof stats) == -ESHUTDOWN);
    CHECK(rtrs_free(volume) == 0);
    puts("passed");
    return 0;
}
