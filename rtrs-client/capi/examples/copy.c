/*
 * Copies a volume to a second volume of at least the same size:
 *   cc -o copy copy.c -lrtrs && ./copy tcp://10.0.0.2/vol0 tcp://10.0.0.3/vol0
 *
 * Several requests are in flight. Each buffer is read from the source, then written to the target.
 * The program sleeps in poll(2) until one of the two queues has completions.
 */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rtrs.h>

#define DEPTH 16
#define PIECE (256 * 1024)
/* Longest wait without any completion, in milliseconds. */
#define PATIENCE 300000

struct buffer {
    uint64_t offset;
    size_t bytes;
    unsigned char data[PIECE];
};

struct end {
    rtrs_volume *volume;
    rtrs_queue *queue;
    struct rtrs_geometry geometry;
};

/* Exits unless the result is 0 or a count. */
static int check(const char *what, int result)
{
    if (result >= 0)
        return result;
    fprintf(stderr, "cannot %s: %s\n", what, rtrs_error_message());
    exit(1);
}

static void open_end(struct end *end, const char *uri, const char *access)
{
    rtrs_options *options;
    check(uri, rtrs_options_from_uri(uri, &options));
    check("set the access", rtrs_options_set(options, "access", access));
    check(uri, rtrs_open(options, &end->volume));
    rtrs_options_free(options);
    check("get the queue", rtrs_get_queue(end->volume, 0, &end->queue));
    check("get the size",
          rtrs_get_geometry(end->volume, &end->geometry, sizeof end->geometry));
}

/* Reads the next part of the source. Returns 0 at its end. */
static int read_next(struct end *source, struct buffer *buffer, uint64_t *next)
{
    uint64_t left = source->geometry.size - *next;
    if (left == 0)
        return 0;
    buffer->offset = *next;
    buffer->bytes = left < PIECE ? (size_t)left : PIECE;
    *next += buffer->bytes;
    check("read", rtrs_submit_read(source->queue, buffer->data, buffer->bytes, buffer->offset, 0,
                                   buffer));
    return 1;
}

/* Takes the completions that have arrived. Returns their number. */
static int take(struct end *end, const char *what, struct rtrs_completion *done)
{
    int count = check(what, rtrs_poll(end->queue, 0, DEPTH, 0, done));
    for (int at = 0; at < count; at++) {
        if (done[at].result < 0) {
            const struct buffer *buffer = done[at].user_data;
            fprintf(stderr, "cannot %s at %" PRIu64 ": %s\n", what, buffer->offset,
                    strerror(-done[at].result));
            exit(1);
        }
    }
    return count;
}

static void copy(struct end *source, struct end *target)
{
    struct rtrs_completion done[DEPTH];
    struct buffer *buffers = calloc(DEPTH, sizeof *buffers);
    struct pollfd fds[2] = {
        {.fd = rtrs_queue_fd(source->queue), .events = POLLIN},
        {.fd = rtrs_queue_fd(target->queue), .events = POLLIN},
    };
    uint64_t next = 0;
    int busy = 0;

    if (!buffers) {
        fprintf(stderr, "cannot copy: no memory\n");
        exit(1);
    }
    while (busy < DEPTH && read_next(source, &buffers[busy], &next))
        busy++;
    while (busy > 0) {
        if (poll(fds, 2, PATIENCE) <= 0) {
            fprintf(stderr, "cannot copy: no completion within %d ms\n", PATIENCE);
            exit(1);
        }
        int count = take(source, "read", done);
        for (int at = 0; at < count; at++) {
            struct buffer *buffer = done[at].user_data;
            check("write", rtrs_submit_write(target->queue, buffer->data, buffer->bytes,
                                             buffer->offset, 0, buffer));
        }
        count = take(target, "write", done);
        for (int at = 0; at < count; at++)
            busy -= !read_next(source, done[at].user_data, &next);
    }
    check("flush", rtrs_flush(target->queue));
    free(buffers);
}

int main(int count, char **words)
{
    struct end source, target;
    if (count != 3) {
        fprintf(stderr, "usage: copy SOURCE-URI TARGET-URI\n");
        return 2;
    }
    open_end(&source, words[1], "ro");
    open_end(&target, words[2], "rw");
    if (target.geometry.size < source.geometry.size) {
        fprintf(stderr, "%s is smaller than %s\n", words[2], words[1]);
        return 1;
    }
    copy(&source, &target);
    printf("copied %" PRIu64 " bytes\n", source.geometry.size);
    check("close the target", rtrs_close(target.volume, PATIENCE));
    check("free the target", rtrs_free(target.volume));
    check("free the source", rtrs_free(source.volume));
    return 0;
}
