/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * librtrs: volumes of rtrs-server, or of the rnbd-server module of Linux, within a program.
 *
 * Results. Functions that return int return 0 or a count, or a negative errno. After a failure,
 * rtrs_error_message() has the reason. Frequent values:
 *   -EINVAL      an argument, setting or URI is invalid
 *   -ENOTCONN    no path opens the volume
 *   -EAGAIN      the queue is full: poll it
 *   -EBUSY       another thread is using the queue, or a thread of the library does not answer
 *   -EPERM       another process has opened the volume; this one is its child
 *   -ESHUTDOWN   the volume is closed, or its session has ended
 *   -ETIMEDOUT   a blocking call's request has not ended in time; it may still take effect
 *   -EIO         the request failed; or the library has failed, as will each later call
 *
 * Threads. Calls on a volume may run in parallel. A queue may be used by one thread at a time: use
 * during a call of another thread fails with -EBUSY. Handles are not checked: their use after
 * rtrs_free() or rtrs_options_free() is undefined.
 *
 * Memory. Data is sent from and received into the memory of a request in place. It must stay
 * mapped, and the bytes of a write must not change, until rtrs_poll() returns the completion, or
 * rtrs_free() has returned 0.
 *
 * Versions. Functions are added, and structures with a size argument grow at their end, within one
 * soname.
 */
#ifndef RTRS_H
#define RTRS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rtrs_options rtrs_options;
typedef struct rtrs_volume rtrs_volume;
typedef struct rtrs_queue rtrs_queue;

/* Returns the version of the library, such as "0.1.0". */
const char *rtrs_version(void);

/* Returns the reason for the last failure in this thread, valid until the next call of a function
 * of this library in this thread; "" before the first failure. */
const char *rtrs_error_message(void);

/* ---- Log ---- */

enum {
    RTRS_LOG_ERROR = 1,
    RTRS_LOG_WARN = 2,
    RTRS_LOG_INFO = 3,
    RTRS_LOG_DEBUG = 4,
    RTRS_LOG_TRACE = 5
};

typedef void (*rtrs_log_function)(void *user_data, int level, const char *message);

/* Sets the receiver of log messages of the whole process up to this level. NULL, the default, sets
 * none. Threads of the library call it, several at a time. It must not use the library. When
 * rtrs_set_log() returns, the previous receiver is not running and will not be called. */
int rtrs_set_log(rtrs_log_function function, void *user_data, int level);

/* ---- Open ---- */

/* Creates the settings of a volume of this export. It needs at least one setting "path". */
int rtrs_options_new(const char *export_name, rtrs_options **options);

/* Creates settings from a URI: SCHEME://HOST[:PORT]/EXPORT[?NAME=VALUE&...]. */
int rtrs_options_from_uri(const char *uri, rtrs_options **options);

/* Sets a setting of a session, or one of queues, queue-depth, io-max and retry-for. "path" and
 * "server-key" add a value. Values are checked by rtrs_open(). */
int rtrs_options_set(rtrs_options *options, const char *name, const char *value);

/* Frees the settings. NULL is ignored. Volumes that were opened with them stay open. */
void rtrs_options_free(rtrs_options *options);

/* Opens a volume with its queues. Waits at most 30 s longer than the setting retry-for, plus the
 * time that the system's resolver takes. */
int rtrs_open(const rtrs_options *options, rtrs_volume **volume);

/* Opens the volume of a URI. */
int rtrs_open_uri(const char *uri, rtrs_volume **volume);

/* Ends the session. Requests in flight have this time to finish, at most an hour; the rest fail
 * with -ECONNABORTED, and the server may still run them. Returns the number of these. Queues take
 * no more requests; rtrs_poll() still returns completions. Takes at most 20 s longer. */
int rtrs_close(rtrs_volume *volume, uint32_t grace_ms);

/* Frees a volume and its queues; ends the session at once if rtrs_close() has not. Afterwards the
 * memory of all requests belongs to the program. Fails with -EBUSY if a call on the volume or
 * a queue is running, or if the system still uses memory of a request; then the volume is not
 * freed, and the call can be repeated. In a child process it changes nothing in the parent. NULL is
 * ignored. */
int rtrs_free(rtrs_volume *volume);

/* ---- Volume ---- */

enum {
    RTRS_READ_ONLY = 1,    /* writes are refused */
    RTRS_WRITE_CACHE = 2,  /* completed writes need a flush to be durable */
    RTRS_HAS_FUA = 4,      /* RTRS_FUA is honored */
    RTRS_HAS_DISCARD = 8,  /* discards have an effect */
    RTRS_HAS_ZEROES = 16,  /* write zeroes is accepted */
    RTRS_HAS_EXTENTS = 32  /* rtrs_extents() is answered */
};

struct rtrs_geometry {
    uint64_t size;           /* bytes */
    uint32_t logical_block;  /* offsets and lengths are multiples of it */
    uint32_t physical_block; /* block size that the server prefers */
    uint32_t io_max;         /* longest read or write; see rtrs_queue_io_max() */
    uint32_t discard_max;    /* longest discard */
    uint32_t zeroes_max;     /* longest write zeroes */
    uint32_t flags;          /* RTRS_READ_ONLY ... */
};

/* Writes the current size, limits and capabilities; `bytes` is sizeof(struct rtrs_geometry). */
int rtrs_get_geometry(const rtrs_volume *volume, struct rtrs_geometry *geometry, size_t bytes);

/* Writes the identity of server and export, for the setting "identity", as a string of at most
 * `bytes` bytes. Returns its length without the terminating 0, or 0 if the server reports none. */
int rtrs_get_identity(const rtrs_volume *volume, char *text, size_t bytes);

struct rtrs_op_stats {
    uint64_t count;  /* requests that have ended */
    uint64_t bytes;  /* bytes of the successful ones */
    uint64_t errors; /* failed ones */
};

/* Counters since the volume was opened, over all queues. */
struct rtrs_stats {
    struct rtrs_op_stats read, write, flush, discard, write_zeroes, extents;
    uint64_t inflight;        /* requests that have not ended */
    uint64_t paths;           /* paths of the session */
    uint64_t paths_connected; /* those that are connected */
    uint64_t failovers;       /* requests that moved to another path, or were repeated */
    uint64_t bounced;         /* requests whose data was copied: see rtrs_mem_register() */
};

/* Writes the counters; `bytes` is sizeof(struct rtrs_stats). */
int rtrs_get_stats(const rtrs_volume *volume, struct rtrs_stats *stats, size_t bytes);

/* Registers memory of the program: reads and writes with one buffer that lies within it use it in
 * place, also over RDMA, where the data of all other requests is copied. All of it is pinned for
 * each path over RDMA, counts as locked memory, and requests wait meanwhile. Over TCP and TLS
 * nothing changes. It must not overlap memory that is registered with the same volume (-EEXIST).
 *
 * The memory must stay mapped until rtrs_mem_unregister() or rtrs_free() has returned 0. After the
 * end of the session, that of a read that fails with -ECONNABORTED may change until then. */
int rtrs_mem_register(rtrs_volume *volume, void *address, size_t bytes);

/* Ends the registration of memory, with the same address and length. Requests in flight end first.
 * Fails with -EBUSY if they do not end within 10 s, and can then be repeated. */
int rtrs_mem_unregister(rtrs_volume *volume, void *address, size_t bytes);

enum {
    RTRS_EVENT_RESIZED = 1,   /* value: new size in bytes */
    RTRS_EVENT_READ_ONLY = 2, /* value: 1 if the volume is read-only now, else 0 */
    RTRS_EVENT_PATHS = 3,     /* value: connected paths; total: paths */
    RTRS_EVENT_FAILED = 4     /* the volume serves no IO; text: reason */
};

struct rtrs_event {
    uint32_t type;
    uint32_t reserved;
    uint64_t value;
    uint64_t total;
    char text[232];
};

/* Waits for a change of the volume; `bytes` is sizeof(struct rtrs_event). Returns 1, or 0 if there
 * is none within the time or the session has ended. Keeps the last 256 events. */
int rtrs_next_event(rtrs_volume *volume, uint32_t timeout_ms, struct rtrs_event *event,
                    size_t bytes);

/* Returns the number of queues: the setting "queues". */
int rtrs_queue_count(const rtrs_volume *volume);

/* Returns a queue by its index, which starts at 0. It belongs to the volume. */
int rtrs_get_queue(rtrs_volume *volume, uint32_t index, rtrs_queue **queue);

/* ---- Queue ---- */

/* Returns an eventfd for poll(2). It is readable while completions wait or if the session has
 * ended, and may be readable without a reason. Then call rtrs_poll() with `min` 0; do not read it.
 */
int rtrs_queue_fd(const rtrs_queue *queue);

/* Returns the maximum number of requests in flight. */
int rtrs_queue_depth(const rtrs_queue *queue);

/* Returns the maximum number of bytes of a read or write. */
int rtrs_queue_io_max(const rtrs_queue *queue);

/* Returns the number of submitted requests whose completions rtrs_poll() has not returned. */
int rtrs_queue_inflight(const rtrs_queue *queue);

enum {
    RTRS_FUA = 1,      /* write, discard, write zeroes: durable when it completes */
    RTRS_NO_UNMAP = 2, /* write zeroes: keep the space allocated */
    RTRS_COPY = 4      /* write: copy the bytes, which may change after the call */
};

/* Submit a request. Offset and length are multiples of the logical block size. `user_data` is
 * returned with the completion. A request that the volume's size, access or capabilities exclude
 * completes with an error. */
int rtrs_submit_read(rtrs_queue *queue, void *buffer, size_t bytes, uint64_t offset,
                     uint32_t flags, void *user_data);
int rtrs_submit_write(rtrs_queue *queue, const void *buffer, size_t bytes, uint64_t offset,
                      uint32_t flags, void *user_data);

/* Submit a request with 1 to 128 buffers. The array is not used after the call. */
int rtrs_submit_readv(rtrs_queue *queue, const struct iovec *iov, int count, uint64_t offset,
                      uint32_t flags, void *user_data);
int rtrs_submit_writev(rtrs_queue *queue, const struct iovec *iov, int count, uint64_t offset,
                       uint32_t flags, void *user_data);

/* Makes durable all writes that completed before this call, on any queue of the volume. */
int rtrs_submit_flush(rtrs_queue *queue, uint32_t flags, void *user_data);

/* Discards the content of a range, which may read as anything afterwards. */
int rtrs_submit_discard(rtrs_queue *queue, uint64_t offset, uint64_t bytes, uint32_t flags,
                        void *user_data);

/* Makes a range read as zeroes. */
int rtrs_submit_write_zeroes(rtrs_queue *queue, uint64_t offset, uint64_t bytes, uint32_t flags,
                             void *user_data);

enum {
    RTRS_NO_EFFECT = 1 /* the request failed and certainly had no effect */
};

struct rtrs_completion {
    void *user_data;
    int32_t result; /* 0 or a negative errno */
    uint32_t flags; /* RTRS_NO_EFFECT or 0 */
    uint64_t reserved;
};

/* Writes at most `max` completions and returns their number. Waits until there are `min`, nothing
 * is in flight, or the time has passed. With `min` 0 it does not wait. */
int rtrs_poll(rtrs_queue *queue, uint32_t min, uint32_t max, uint32_t timeout_ms,
              struct rtrs_completion *completions);

/* ---- Blocking calls ---- */

/* Sets the maximum time of a request of a blocking call; 5 minutes by default. */
int rtrs_queue_set_wait_max(rtrs_queue *queue, uint32_t wait_max_ms);

/* Read or write all bytes, in several requests if there are more than rtrs_queue_io_max(). Data is
 * copied. Completions of submitted requests are left to rtrs_poll(). */
int rtrs_pread(rtrs_queue *queue, void *buffer, size_t bytes, uint64_t offset);
int rtrs_pwrite(rtrs_queue *queue, const void *buffer, size_t bytes, uint64_t offset);

/* Makes durable all writes that completed before, on any queue of the volume. */
int rtrs_flush(rtrs_queue *queue);

struct rtrs_extent {
    uint64_t bytes;
    uint32_t hole; /* 1 if the extent is not allocated and reads as zeroes, else 0 */
    uint32_t reserved;
};

/* Writes the extents of a range from its offset, at least the first and at most `count`, and
 * returns their number. They may end before the range does. */
int rtrs_extents(rtrs_queue *queue, uint64_t offset, uint64_t bytes, struct rtrs_extent *extents,
                 uint32_t count);

#ifdef __cplusplus
}
#endif

#endif
