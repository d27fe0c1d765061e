/* Registered memory: registered URI [DIRECTORY]. With the directory of rtrs-held, also while
 * a request is in flight. Prints `passed`. */
#include <errno.h>
#include <rtrs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Longest wait, in milliseconds. */
#define LONG 120000
#define MIB (1024 * 1024)

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, rtrs_error_message()); \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

/* Checks that the call fails with this errno and a message that contains the word. */
#define FAILS(call, errno_value, word)                                                         \
    CHECK((call) == -(errno_value) && strstr(rtrs_error_message(), word))

static int complete(rtrs_queue *queue)
{
    struct rtrs_completion done;
    CHECK(rtrs_poll(queue, 1, 1, LONG, &done) == 1);
    return done.result;
}

static unsigned char *map(size_t bytes)
{
    void *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void make_file(const char *dir, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "w");
    CHECK(file && fclose(file) == 0);
}

/* Waits for a file of rtrs-held. */
static void await_file(const char *dir, const char *name, int exists)
{
    char path[512];
    struct stat found;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    for (int round = 0; (stat(path, &found) == 0) != exists; round++) {
        CHECK(round < LONG / 10);
        usleep(10000);
    }
}

static void in_place(rtrs_volume *volume, rtrs_queue *queue, unsigned char *memory)
{
    static unsigned char other[8192];
    struct iovec parts[2] = {{memory + MIB, 4096}, {memory, 4096}};

    CHECK(rtrs_mem_register(volume, memory, 2 * MIB) == 0);
    FAILS(rtrs_mem_register(volume, memory + MIB, 2 * MIB), EEXIST, "overlaps");
    FAILS(rtrs_mem_unregister(volume, memory, MIB), EINVAL, "no registration");
    FAILS(rtrs_mem_register(volume, NULL, MIB), EINVAL, "NULL");
    FAILS(rtrs_mem_register(volume, memory, 0), EINVAL, "0 bytes");

    /* Inside, across the end, in pieces, outside, copied. */
    memset(memory, 1, 4096);
    CHECK(rtrs_submit_write(queue, memory, 4096, 0, 0, NULL) == 0 && complete(queue) == 0);
    memset(memory + 2 * MIB - 4096, 2, 8192);
    CHECK(rtrs_submit_write(queue, memory + 2 * MIB - 4096, 8192, 4096, 0, NULL) == 0);
    CHECK(complete(queue) == 0);
    memset(memory + MIB, 3, 4096);
    CHECK(rtrs_submit_writev(queue, parts, 2, 12288, RTRS_FUA, NULL) == 0);
    CHECK(complete(queue) == 0);
    memset(other, 4, 4096);
    CHECK(rtrs_submit_write(queue, other, 4096, 20480, 0, NULL) == 0 && complete(queue) == 0);
    CHECK(rtrs_submit_write(queue, memory + MIB, 4096, 24576, RTRS_COPY, NULL) == 0);
    memset(memory + MIB, 9, 4096);
    CHECK(complete(queue) == 0);
    CHECK(rtrs_submit_read(queue, memory + 4096, 28672, 0, 0, NULL) == 0 && complete(queue) == 0);
    for (int at = 0; at < 28672; at++)
        CHECK(memory[4096 + at] == "\1\2\2\3\1\4\3"[at / 4096]);
    CHECK(memory[4095] == 1 && memory[4096 + 28672] == 0);

    /* Afterwards the memory is like any other. */
    CHECK(rtrs_mem_unregister(volume, memory, 2 * MIB) == 0);
    FAILS(rtrs_mem_unregister(volume, memory, 2 * MIB), EINVAL, "no registration");
    CHECK(rtrs_submit_read(queue, memory, 4096, 12288, 0, NULL) == 0 && complete(queue) == 0);
    CHECK(memory[0] == 3 && memory[4095] == 3);
    CHECK(rtrs_mem_register(volume, memory, 3 * MIB) == 0);
}

/* A registration does not end while the server holds a write from the memory. */
static void in_flight(const char *uri, const char *dir, unsigned char *memory)
{
    rtrs_volume *volume;
    rtrs_queue *queue;
    make_file(dir, "hold");
    await_file(dir, "armed", 1);
    CHECK(rtrs_open_uri(uri, &volume) == 0 && rtrs_get_queue(volume, 0, &queue) == 0);
    CHECK(rtrs_mem_register(volume, memory, 2 * MIB) == 0);
    CHECK(rtrs_submit_write(queue, memory, 4096, 0, 0, NULL) == 0);
    await_file(dir, "holding", 1);
    FAILS(rtrs_mem_unregister(volume, memory, 2 * MIB), EBUSY, "in flight");
    make_file(dir, "release");
    CHECK(complete(queue) == 0);
    CHECK(rtrs_mem_unregister(volume, memory, 2 * MIB) == 0);
    await_file(dir, "release", 0);

    /* After the end of the session, nothing uses the memory. */
    make_file(dir, "hold");
    await_file(dir, "armed", 1);
    CHECK(rtrs_mem_register(volume, memory, 2 * MIB) == 0);
    CHECK(rtrs_submit_write(queue, memory, 4096, 0, 0, NULL) == 0);
    await_file(dir, "holding", 1);
    CHECK(rtrs_close(volume, 0) == 1);
    CHECK(rtrs_mem_unregister(volume, memory, 2 * MIB) == 0);
    CHECK(munmap(memory, 4 * MIB) == 0);
    CHECK(complete(queue) == -ECONNABORTED);
    FAILS(rtrs_mem_register(volume, memory, 2 * MIB), ESHUTDOWN, "closed");
    CHECK(rtrs_free(volume) == 0);
    make_file(dir, "release");
    await_file(dir, "release", 0);
}

int main(int argc, char **argv)
{
    unsigned char *memory = map(4 * MIB);
    rtrs_volume *volume;
    rtrs_queue *queue;
    struct rtrs_stats stats;

    CHECK(argc > 1 && rtrs_open_uri(argv[1], &volume) == 0);
    CHECK(rtrs_get_queue(volume, 0, &queue) == 0);
    in_place(volume, queue, memory);
    CHECK(rtrs_get_stats(volume, &stats, sizeof stats) == 0);
    CHECK(stats.bounced == 0 && stats.write.count == 5 && stats.write.errors == 0);
    /* It also ends the registration. */
    CHECK(rtrs_free(volume) == 0);
    if (argc > 2)
        in_flight(argv[1], argv[2], memory);
    puts("passed");
    return 0;
}
