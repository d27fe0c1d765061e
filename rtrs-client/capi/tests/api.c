/* Uses every function of rtrs.h with the test's server: api MODE URI [DIRECTORY]. */
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rtrs.h>

_Static_assert(sizeof(struct rtrs_geometry) == 32, "size of the ABI");
_Static_assert(sizeof(struct rtrs_event) == 256, "size of the ABI");
_Static_assert(sizeof(struct rtrs_completion) == 24, "size of the ABI");
_Static_assert(sizeof(struct rtrs_extent) == 16, "size of the ABI");

/* Time limit of a waiting call, in milliseconds. */
#define LONG 120000
#define KIB 1024
#define MIB (1024 * 1024)

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "line %d: %s; message: %s\n", __LINE__, #condition,                   \
                    rtrs_error_message());                                                        \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

/* Checks that the call fails with this errno and a message that contains the word. */
#define FAILS(call, errno_value, word)                                                            \
    do {                                                                                          \
        int got = (call);                                                                         \
        if (got != -(errno_value) || !strstr(rtrs_error_message(), word)) {                       \
            fprintf(stderr, "line %d: %s is %d, not -%s with '%s'; message: %s\n", __LINE__,      \
                    #call, got, #errno_value, word, rtrs_error_message());                        \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

static void fill(unsigned char *bytes, size_t len, unsigned seed)
{
    for (size_t at = 0; at < len; at++)
        bytes[at] = (unsigned char)((at + seed) % 251);
}

static rtrs_volume *open_volume(const char *uri, rtrs_queue **queue)
{
    rtrs_volume *volume;
    CHECK(rtrs_open_uri(uri, &volume) == 0);
    CHECK(rtrs_get_queue(volume, 0, queue) == 0);
    return volume;
}

/* Polls one completion, which must have this user data. */
static struct rtrs_completion complete(rtrs_queue *queue, void *user_data)
{
    struct rtrs_completion done;
    CHECK(rtrs_poll(queue, 1, 1, LONG, &done) == 1);
    CHECK(done.user_data == user_data && done.reserved == 0);
    return done;
}

static int count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int count = 0;
    CHECK(dir);
    while (readdir(dir))
        count++;
    closedir(dir);
    return count;
}

static void operations(const char *uri)
{
    static unsigned char written[256 * KIB], read[256 * KIB];
    rtrs_queue *queue;
    rtrs_volume *volume = open_volume(uri, &queue);
    struct rtrs_geometry geometry;
    struct rtrs_completion done[8];
    char identity[256];
    int tag;

    CHECK(rtrs_get_geometry(volume, &geometry, sizeof geometry) == 0);
    CHECK(geometry.size == 64 * MIB && geometry.logical_block == 512);
    CHECK(!(geometry.flags & RTRS_READ_ONLY));
    CHECK(rtrs_get_identity(volume, identity, sizeof identity) == (int)strlen(identity));
    CHECK(strchr(identity, '/'));
    CHECK(rtrs_queue_count(volume) == 1);
    CHECK(rtrs_queue_depth(queue) == 128 && rtrs_queue_io_max(queue) == MIB);

    /* Contiguous and vectored requests. */
    fill(written, sizeof written, 1);
    struct iovec parts[3] = {{written, 4096}, {written + 4096, 0}, {written + 4096, 60 * KIB}};
    CHECK(rtrs_submit_writev(queue, parts, 3, 0, RTRS_FUA, &tag) == 0);
    CHECK(complete(queue, &tag).result == 0);
    CHECK(rtrs_submit_write(queue, written + 64 * KIB, 192 * KIB, 64 * KIB, 0, NULL) == 0);
    CHECK(rtrs_queue_inflight(queue) == 1);
    CHECK(complete(queue, NULL).result == 0);
    CHECK(rtrs_submit_flush(queue, 0, &tag) == 0);
    CHECK(complete(queue, &tag).result == 0);
    parts[1].iov_len = 64 * KIB, parts[0].iov_base = read, parts[1].iov_base = read + 4096;
    CHECK(rtrs_submit_readv(queue, parts, 2, 0, 0, &tag) == 0);
    CHECK(complete(queue, &tag).result == 0);
    CHECK(!memcmp(read, written, 68 * KIB));

    /* Several requests in flight, with waits on the descriptor. */
    for (int at = 0; at < 8; at++)
        CHECK(rtrs_submit_read(queue, read + at * 32 * KIB, 32 * KIB, (uint64_t)at * 32 * KIB, 0,
                               read + at) == 0);
    for (int left = 8; left > 0;) {
        struct pollfd fd = {.fd = rtrs_queue_fd(queue), .events = POLLIN};
        CHECK(poll(&fd, 1, LONG) == 1);
        int count = rtrs_poll(queue, 0, 3, 0, done);
        CHECK(count >= 0 && count <= 3);
        for (int at = 0; at < count; at++)
            CHECK(done[at].result == 0);
        left -= count;
    }
    CHECK(!memcmp(read, written, sizeof read));
    CHECK(rtrs_poll(queue, 1, 8, LONG, done) == 0); /* nothing is in flight */

    /* A copied write, whose bytes change right after the call. */
    CHECK(rtrs_submit_write(queue, written, 4096, MIB, RTRS_COPY, NULL) == 0);
    memset(written, 0xee, 4096);
    CHECK(complete(queue, NULL).result == 0);
    fill(written, 4096, 1);
    CHECK(rtrs_pread(queue, read, 4096, MIB) == 0 && !memcmp(read, written, 4096));

    /* Zeroes, discard, extents, blocking calls. */
    CHECK(rtrs_submit_write_zeroes(queue, MIB, 4096, RTRS_NO_UNMAP | RTRS_FUA, NULL) == 0);
    CHECK(complete(queue, NULL).result == 0);
    CHECK(rtrs_pread(queue, read, 4096, MIB) == 0);
    for (int at = 0; at < 4096; at++)
        CHECK(read[at] == 0);
    if (geometry.flags & RTRS_HAS_DISCARD) {
        CHECK(rtrs_submit_discard(queue, MIB, MIB, 0, NULL) == 0);
        CHECK(complete(queue, NULL).result == 0);
    }
    if (geometry.flags & RTRS_HAS_EXTENTS) {
        struct rtrs_extent extents[4];
        int count = rtrs_extents(queue, 0, 8 * MIB, extents, 4);
        CHECK(count >= 1 && count <= 4 && extents[0].bytes > 0 && extents[0].hole == 0);
    }
    unsigned char *large = malloc(5 * MIB), *back = malloc(5 * MIB);
    CHECK(large && back);
    fill(large, 5 * MIB, 9);
    CHECK(rtrs_pwrite(queue, large, 5 * MIB, 59 * MIB) == 0 && rtrs_flush(queue) == 0);
    CHECK(rtrs_pread(queue, back, 5 * MIB, 59 * MIB) == 0 && !memcmp(large, back, 5 * MIB));
    free(large);
    free(back);

    /* Requests that the volume refuses. */
    CHECK(rtrs_submit_read(queue, read, 4096, 64 * MIB, 0, NULL) == 0);
    done[0] = complete(queue, NULL);
    CHECK(done[0].result < 0 && done[0].flags == RTRS_NO_EFFECT);
    FAILS(rtrs_pread(queue, read, 4096, 64 * MIB), EINVAL, "read");

    CHECK(rtrs_close(volume, LONG) == 0);
    FAILS(rtrs_submit_flush(queue, 0, NULL), ESHUTDOWN, "closed");
    FAILS(rtrs_get_geometry(volume, &geometry, sizeof geometry), ESHUTDOWN, "closed");
    CHECK(rtrs_close(volume, 0) == 0);
    CHECK(rtrs_free(volume) == 0);
    CHECK(rtrs_free(NULL) == 0);
}

static void no_log(void *user_data, int level, const char *message)
{
    fprintf(stderr, "level %d: %s %p\n", level, message, user_data);
    abort();
}

static void errors(const char *uri)
{
    static unsigned char bytes[8192];
    char small[4], long_uri[512];
    struct rtrs_completion done[2];
    struct rtrs_geometry geometry;
    struct rtrs_event event;
    struct rtrs_extent extent;
    struct iovec part = {bytes, 512};
    rtrs_options *options;
    rtrs_volume *volume = (rtrs_volume *)bytes;
    rtrs_queue *queue, *none = NULL;

    CHECK(!strcmp(rtrs_error_message(), "") && strchr(rtrs_version(), '.'));

    /* Settings and URIs. */
    FAILS(rtrs_options_new(NULL, &options), EINVAL, "export_name is NULL");
    FAILS(rtrs_options_new("vol0", NULL), EINVAL, "options is NULL");
    FAILS(rtrs_options_new("\xff", &options), EINVAL, "UTF-8");
    FAILS(rtrs_options_from_uri("vol0", &options), EINVAL, "cannot use the URI");
    CHECK(!options);
    FAILS(rtrs_open_uri("tcp://h/v?queues=no", &volume), EINVAL, "queues");
    CHECK(!volume);
    FAILS(rtrs_options_set(NULL, "path", "tcp://h"), EINVAL, "options is NULL");
    CHECK(rtrs_options_new("vol0", &options) == 0);
    FAILS(rtrs_options_set(options, NULL, "x"), EINVAL, "name is NULL");
    FAILS(rtrs_open(options, &volume), EINVAL, "no path");
    FAILS(rtrs_open(options, NULL), EINVAL, "volume is NULL");
    CHECK(rtrs_options_set(options, "polcy", "x") == 0);
    FAILS(rtrs_open(options, &volume), EINVAL, "did you mean policy");
    rtrs_options_free(options);
    rtrs_options_free(NULL);
    snprintf(long_uri, sizeof long_uri, "%s-none", uri);
    FAILS(rtrs_open_uri(long_uri, &volume), ENOTCONN, "ENOENT");

    /* Handles, structures and sizes. */
    snprintf(long_uri, sizeof long_uri, "%s?queue-depth=1&io-max=4k&no-path=fail", uri);
    CHECK(rtrs_options_from_uri(long_uri, &options) == 0);
    CHECK(rtrs_open(options, &volume) == 0);
    rtrs_options_free(options);
    FAILS(rtrs_get_queue(volume, 1, &queue), EINVAL, "no queue 1");
    CHECK(!queue && rtrs_get_queue(volume, 0, &queue) == 0);
    FAILS(rtrs_queue_fd(NULL), EINVAL, "queue is NULL");
    FAILS(rtrs_get_geometry(volume, NULL, sizeof geometry), EINVAL, "geometry is NULL");
    FAILS(rtrs_get_geometry(volume, &geometry, 8), EINVAL, "cannot have 8 bytes");
    FAILS(rtrs_next_event(volume, 0, &event, 1 << 20), EINVAL, "cannot have 1048576 bytes");
    FAILS(rtrs_get_identity(volume, small, sizeof small), ERANGE, "but the buffer has");
    FAILS(rtrs_get_geometry(NULL, &geometry, sizeof geometry), EINVAL, "volume is NULL");
    FAILS(rtrs_set_log(no_log, NULL, 9), EINVAL, "level 9");

    /* Requests. */
    FAILS(rtrs_submit_read(none, bytes, 512, 0, 0, NULL), EINVAL, "queue is NULL");
    FAILS(rtrs_submit_read(queue, NULL, 512, 0, 0, NULL), EINVAL, "NULL");
    FAILS(rtrs_submit_read(queue, bytes, 511, 0, 0, NULL), EINVAL, "length 511");
    FAILS(rtrs_submit_read(queue, bytes, 0, 0, 0, NULL), EINVAL, "length 0");
    FAILS(rtrs_submit_read(queue, bytes, 512, 100, 0, NULL), EINVAL, "offset 100");
    FAILS(rtrs_submit_read(queue, bytes, 8192, 0, 0, NULL), EINVAL, "at most 4096 bytes");
    FAILS(rtrs_submit_read(queue, bytes, SIZE_MAX, 0, 0, NULL), EINVAL, "cannot have");
    FAILS(rtrs_submit_read(queue, bytes, 512, 0, RTRS_FUA, NULL), EINVAL, "flags 0x1");
    FAILS(rtrs_submit_write(queue, bytes, 512, 0, 0x80, NULL), EINVAL, "flags 0x80");
    FAILS(rtrs_submit_writev(queue, &part, 0, 0, 0, NULL), EINVAL, "1 to 128");
    FAILS(rtrs_submit_readv(queue, &part, 129, 0, 0, NULL), EINVAL, "1 to 128");
    FAILS(rtrs_submit_readv(queue, NULL, 1, 0, 0, NULL), EINVAL, "iov is NULL");
    part.iov_base = NULL;
    FAILS(rtrs_submit_readv(queue, &part, 1, 0, 0, NULL), EINVAL, "NULL");
    FAILS(rtrs_submit_discard(queue, 0, (uint64_t)1 << 40, 0, NULL), EINVAL, "too long");
    FAILS(rtrs_submit_write_zeroes(queue, UINT64_MAX - 511, 512, 0, NULL), EINVAL, "64 bits");
    FAILS(rtrs_submit_flush(queue, RTRS_COPY, NULL), EINVAL, "flags");
    FAILS(rtrs_poll(queue, 0, 0, 0, done), EINVAL, "number of results");
    FAILS(rtrs_poll(queue, 0, 1, 0, NULL), EINVAL, "completions is NULL");
    FAILS(rtrs_pread(queue, bytes, 100, 0), EINVAL, "length 100");
    FAILS(rtrs_pwrite(queue, NULL, 512, 0), EINVAL, "NULL");
    FAILS(rtrs_extents(queue, 0, 512, &extent, 0), EINVAL, "number of results");

    /* A full queue of one request. */
    CHECK(rtrs_submit_write(queue, bytes, 512, 0, 0, bytes) == 0);
    FAILS(rtrs_submit_flush(queue, 0, NULL), EAGAIN, "poll it");
    CHECK(complete(queue, bytes).result == 0);
    CHECK(rtrs_submit_flush(queue, 0, NULL) == 0);
    CHECK(complete(queue, NULL).result == 0);
    CHECK(rtrs_queue_set_wait_max(queue, LONG) == 0 && rtrs_flush(queue) == 0);
    CHECK(rtrs_free(volume) == 0);
}

static void child(const char *uri)
{
    static unsigned char bytes[4096];
    rtrs_queue *queue;
    rtrs_volume *volume = open_volume(uri, &queue);
    struct rtrs_completion done;
    struct rtrs_geometry geometry;
    int status;

    fill(bytes, sizeof bytes, 3);
    CHECK(rtrs_submit_write(queue, bytes, sizeof bytes, 0, 0, bytes) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        FAILS(rtrs_poll(queue, 0, 1, 0, &done), EPERM, "after the fork");
        FAILS(rtrs_submit_flush(queue, 0, NULL), EPERM, "after the fork");
        FAILS(rtrs_pread(queue, bytes, 512, 0), EPERM, "after the fork");
        FAILS(rtrs_get_geometry(volume, &geometry, sizeof geometry), EPERM, "after the fork");
        FAILS(rtrs_close(volume, 0), EPERM, "after the fork");
        CHECK(rtrs_free(volume) == 0);
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(complete(queue, bytes).result == 0);
    CHECK(rtrs_pread(queue, bytes, sizeof bytes, 0) == 0 && bytes[1] == 4);
    CHECK(rtrs_free(volume) == 0);
}

/* Exits with a request in flight and the volume open. */
static void leaves(const char *uri)
{
    static unsigned char bytes[4096];
    rtrs_queue *queue;
    CHECK(open_volume(uri, &queue));
    CHECK(rtrs_submit_write(queue, bytes, sizeof bytes, 0, 0, NULL) == 0);
}

static void opens(const char *uri)
{
    int before = 0;
    for (int round = 0; round < 50; round++) {
        rtrs_queue *queue;
        rtrs_volume *volume = open_volume(uri, &queue);
        CHECK(rtrs_flush(queue) == 0);
        CHECK(round % 2 || rtrs_close(volume, LONG) == 0);
        CHECK(rtrs_free(volume) == 0);
        if (round == 4)
            before = count_fds();
    }
    CHECK(count_fds() == before);
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

static void make_file(const char *dir, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *file = fopen(path, "w");
    CHECK(file && fclose(file) == 0);
}

static void *poll_one(void *queue)
{
    struct rtrs_completion done;
    CHECK(rtrs_poll(queue, 1, 1, LONG, &done) == 1);
    CHECK(done.result == -ECONNABORTED && done.user_data == queue);
    return NULL;
}

/* Closes the volume with a write in flight that the server holds, while another thread polls. */
static void held(const char *uri, const char *dir)
{
    static unsigned char bytes[4096];
    rtrs_queue *queue;
    pthread_t thread;
    make_file(dir, "hold");
    await_file(dir, "armed", 1);
    rtrs_volume *volume = open_volume(uri, &queue);

    CHECK(rtrs_submit_write(queue, bytes, sizeof bytes, 0, 0, queue) == 0);
    await_file(dir, "holding", 1);
    CHECK(pthread_create(&thread, NULL, poll_one, queue) == 0);
    int busy = 0;
    for (int round = 0; busy != -EBUSY; round++) {
        CHECK(round < LONG / 10);
        usleep(10000);
        busy = rtrs_queue_inflight(queue);
        CHECK(busy == 1 || busy == -EBUSY);
    }
    FAILS(rtrs_flush(queue), EBUSY, "another thread");
    FAILS(rtrs_free(volume), EBUSY, "another thread");
    CHECK(rtrs_close(volume, 50) == 1);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(rtrs_free(volume) == 0);

    /* The memory belongs to the program again, without a poll. */
    make_file(dir, "release");
    await_file(dir, "release", 0);
    make_file(dir, "hold");
    await_file(dir, "armed", 1);
    char retry[512];
    snprintf(retry, sizeof retry, "%s?retry-for=60s", uri);
    volume = open_volume(retry, &queue);
    unsigned char *own = malloc(65536);
    CHECK(own && rtrs_submit_write(queue, own, 65536, 0, 0, NULL) == 0);
    await_file(dir, "holding", 1);
    CHECK(rtrs_free(volume) == 0);
    memset(own, 0xee, 65536);
    free(own);
    make_file(dir, "release");
    await_file(dir, "release", 0);
}

static int messages;

static void receive_log(void *user_data, int level, const char *message)
{
    CHECK(user_data == &messages && level >= RTRS_LOG_ERROR && level <= RTRS_LOG_DEBUG);
    __atomic_add_fetch(&messages, message[0] != 0, __ATOMIC_SEQ_CST);
}

/* Reports the number of paths, after a line that lets the test stop the server. */
static void events(const char *uri)
{
    rtrs_queue *queue;
    struct rtrs_event event;
    struct rtrs_completion done;
    char ready[512];
    static unsigned char bytes[4096];
    CHECK(rtrs_set_log(receive_log, &messages, RTRS_LOG_DEBUG) == 0);
    snprintf(ready, sizeof ready, "%s?no-path=fail", uri);
    rtrs_volume *volume = open_volume(ready, &queue);
    CHECK(rtrs_next_event(volume, 0, &event, sizeof event) == 0);
    puts("opened");
    CHECK(fflush(stdout) == 0);
    do
        CHECK(rtrs_next_event(volume, LONG, &event, sizeof event) == 1);
    while (event.type != RTRS_EVENT_PATHS);
    CHECK(event.value == 0 && event.total == 1);
    CHECK(rtrs_submit_read(queue, bytes, sizeof bytes, 0, 0, NULL) == 0);
    done = complete(queue, NULL);
    CHECK(done.result < 0);
    FAILS(rtrs_pread(queue, bytes, sizeof bytes, 0), -done.result, "cannot read");
    CHECK(rtrs_close(volume, 0) == 0);
    CHECK(rtrs_set_log(NULL, NULL, 0) == 0);
    CHECK(__atomic_load_n(&messages, __ATOMIC_SEQ_CST) > 0);
    CHECK(rtrs_free(volume) == 0);
}

int main(int count, char **words)
{
    if (count < 3)
        return 2;
    const char *mode = words[1], *uri = words[2];
    if (!strcmp(mode, "operations"))
        operations(uri);
    else if (!strcmp(mode, "errors"))
        errors(uri);
    else if (!strcmp(mode, "child"))
        child(uri);
    else if (!strcmp(mode, "leaves"))
        leaves(uri);
    else if (!strcmp(mode, "opens"))
        opens(uri);
    else if (!strcmp(mode, "events"))
        events(uri);
    else if (!strcmp(mode, "held") && count == 4)
        held(uri, words[3]);
    else
        return 2;
    puts("passed");
    return 0;
}
