/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * fio engine for volumes, with librtrs: see docs/how-to/embed.md. build.sh compiles it.
 *
 * Jobs of a process that have the same settings share a session. The session is opened when fio
 * sets up the first of them, with a queue for each job that may run at the same time, and closed
 * when the last one ends. A job takes a queue when it starts and returns it when it ends.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fio.h>
#include <optgroup.h>
#include <rtrs.h>

/* Minimum and granularity of the setting io-max. */
#define IO_STEP 4096ULL
/* Time for requests in flight when a session is closed, in milliseconds. */
#define CLOSE_MS 10000
/* Length of one wait for completions, in milliseconds. */
#define WAIT_MS 10000
/* Time for attempts to open a volume. */
#define RETRY_FOR "5s"

struct engine_options {
    void *td; /* set by fio */
    char *uri;
    char *set;
};

/* Queue of a session. */
struct slot {
    rtrs_queue *queue;
    bool is_taken;
};

/* Job of a session. */
struct member {
    const struct thread_data *td;
    bool has_ended;
};

struct session {
    struct session *next;
    rtrs_volume *volume; /* NULL when closed */
    int status;          /* 0, or the negative errno of the open */
    struct rtrs_geometry geometry;
    struct slot *slots;
    unsigned int slot_count;
    struct member *members;
    unsigned int member_count;
};

/* Job that has been set up. */
struct job {
    struct session *session;
    struct slot *slot;             /* NULL until the job starts */
    struct rtrs_completion *done;  /* from the last getevents() */
    unsigned int depth;
    uint32_t write_flags;
    bool has_reported; /* a submission's failure was logged */
};

/* Demands of the jobs that share a session. */
struct plan {
    unsigned int members;
    unsigned int queues;
    unsigned int depth;
    unsigned long long io_max;
    bool writes;
};

struct ioengine_ops ioengine;

/* Guards the sessions and what they contain. Open volumes and queues in use are not guarded. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct session *sessions;
static unsigned int open_sessions;

/* Logs the reason for a failed call. Returns its result. */
static int check(const char *what, int result)
{
    if (result < 0)
        log_err("rtrs: cannot %s: %s\n", what, rtrs_error_message());
    return result;
}

static void log_message(void *user_data, int level, const char *message)
{
    (void)user_data;
    (void)level;
    log_err("rtrs: %s\n", message);
}

/* ---- Planning ---- */

static bool is_same(const char *a, const char *b)
{
    return a == b || (a && b && !strcmp(a, b));
}

static bool shares_session(const struct thread_data *a, const struct thread_data *b)
{
    const struct engine_options *first = a->eo, *second = b->eo;

    return b->io_ops == a->io_ops && is_same(first->uri, second->uri) &&
           is_same(first->set, second->set);
}

static bool writes(const struct thread_data *td)
{
    return td_write(td) || td_trim(td);
}

/* Returns the longest read or write of a job. */
static unsigned long long io_max_of(const struct thread_data *td)
{
    return max(td->o.max_bs[DDIR_READ], td->o.max_bs[DDIR_WRITE]);
}

/* Adds up the demands of all jobs that share a session with this one. All jobs are known and none
 * has started. */
static struct plan plan_for(const struct thread_data *td)
{
    struct plan plan = {.io_max = IO_STEP};
    unsigned int together = 0;
    bool is_delayed = false;

    for (unsigned int at = 0; at < thread_number; at++) {
        const struct thread_data *other = tnumber_to_td(at);

        /* With stonewall, a job starts after all earlier ones, except those that wait. */
        if (other->o.stonewall && !is_delayed)
            together = 0;
        is_delayed |= other->o.start_delay || other->o.wait_for;
        if (!shares_session(td, other))
            continue;
        together++;
        plan.members++;
        plan.queues = max(plan.queues, together);
        plan.depth = max(plan.depth, other->o.iodepth);
        plan.io_max = max(plan.io_max, io_max_of(other));
        plan.writes |= writes(other);
    }
    plan.io_max = (plan.io_max + IO_STEP - 1) / IO_STEP * IO_STEP;
    return plan;
}

/* ---- Sessions; the caller holds the lock ---- */

static int set_number(rtrs_options *options, const char *name, unsigned long long value)
{
    char text[24];

    snprintf(text, sizeof text, "%llu", value);
    return check("apply a setting", rtrs_options_set(options, name, text));
}

/* Applies settings of the form NAME=VALUE,... */
static int set_list(rtrs_options *options, const char *list)
{
    char *copy = strdup(list), *rest = copy, *name;
    int status = copy ? 0 : -ENOMEM;

    while (!status && (name = strsep(&rest, ","))) {
        char *value = strchr(name, '=');

        if (!value) {
            log_err("rtrs: rtrs_set has '%s', which is not NAME=VALUE\n", name);
            status = -EINVAL;
            break;
        }
        *value++ = '\0';
        status = check("apply a setting", rtrs_options_set(options, name, value));
    }
    free(copy);
    return status;
}

/* Whether the query of a URI contains a setting. */
static bool has_setting(const char *uri, const char *name)
{
    const char *found = uri;
    size_t len = strlen(name);

    while ((found = strstr(found + 1, name)))
        if ((found[-1] == '?' || found[-1] == '&') && found[len] == '=')
            return true;
    return false;
}

static int open_volume(struct session *session, const struct engine_options *given,
                       const struct plan *plan)
{
    rtrs_options *options = NULL;
    char what[256];
    int status;

    if (!given->uri) {
        log_err("rtrs: the option uri is missing; for example uri=tcp://HOST/EXPORT\n");
        return -EINVAL;
    }
    snprintf(what, sizeof what, "open %s", given->uri);
    status = check(what, rtrs_options_from_uri(given->uri, &options));
    if (!status)
        status = set_number(options, "queues", plan->queues);
    if (!status)
        status = set_number(options, "queue-depth", plan->depth);
    if (!status)
        status = set_number(options, "io-max", plan->io_max);
    /* Any number of sessions may read. */
    if (!status && !has_setting(given->uri, "access"))
        status = check("apply a setting",
                       rtrs_options_set(options, "access", plan->writes ? "rw" : "ro"));
    /* The server may still be closing the session of an earlier run. */
    if (!status && !has_setting(given->uri, "retry-for"))
        status = check("apply a setting", rtrs_options_set(options, "retry-for", RETRY_FOR));
    if (!status && given->set)
        status = set_list(options, given->set);
    if (!status)
        status = check(what, rtrs_open(options, &session->volume));
    rtrs_options_free(options);
    return status;
}

static int open_session(struct session *session, const struct thread_data *td,
                        const struct plan *plan)
{
    struct rtrs_geometry *geometry = &session->geometry;
    int count, status;

    status = open_volume(session, td->eo, plan);
    if (status)
        return status;
    /* A failed open returns its reasons, so logging starts only now. */
    if (open_sessions++ == 0)
        check("set the log", rtrs_set_log(log_message, NULL, RTRS_LOG_WARN));
    status = rtrs_get_geometry(session->volume, geometry, sizeof *geometry);
    if (check("get the size of the volume", status))
        return status;
    count = check("count the queues", rtrs_queue_count(session->volume));
    if (count < 0)
        return count;
    session->slots = calloc(count, sizeof *session->slots);
    if (!session->slots)
        return -ENOMEM;
    session->slot_count = count;
    for (int at = 0; at < count; at++) {
        status = rtrs_get_queue(session->volume, at, &session->slots[at].queue);
        if (check("get a queue", status))
            return status;
    }
    return 0;
}

static void close_session(struct session *session)
{
    int left;

    if (!session->volume)
        return;
    left = check("close the session", rtrs_close(session->volume, CLOSE_MS));
    if (left > 0)
        log_err("rtrs: closed the session with %d requests in flight\n", left);
    check("free the session", rtrs_free(session->volume));
    session->volume = NULL;
    if (session->status == 0)
        session->status = -ESHUTDOWN;
    if (--open_sessions == 0)
        check("reset the log", rtrs_set_log(NULL, NULL, 0));
}

static struct session *find_session(const struct thread_data *td)
{
    for (struct session *session = sessions; session; session = session->next)
        for (unsigned int at = 0; at < session->member_count; at++)
            if (session->members[at].td == td)
                return session;
    return NULL;
}

/* Creates the session of a job and of those that share it. `status` holds the error of the open. */
static struct session *create_session(const struct thread_data *td)
{
    struct plan plan = plan_for(td);
    struct session *session = calloc(1, sizeof *session);

    if (!session)
        return NULL;
    session->members = calloc(plan.members, sizeof *session->members);
    if (!session->members) {
        free(session);
        return NULL;
    }
    for (unsigned int at = 0; at < thread_number; at++) {
        const struct thread_data *other = tnumber_to_td(at);

        if (shares_session(td, other))
            session->members[session->member_count++].td = other;
    }
    session->next = sessions;
    sessions = session;
    session->status = open_session(session, td, &plan);
    if (session->status)
        close_session(session);
    return session;
}

/* Removes a job from its session. Closes the session unless another job may still use it. */
static void leave_session(struct session *session, const struct thread_data *td)
{
    bool is_needed = false;

    for (unsigned int at = 0; at < session->member_count; at++) {
        struct member *member = &session->members[at];
        bool is_cancelled = member->td->runstate == TD_NOT_CREATED && member->td->terminate;

        if (member->td == td)
            member->has_ended = true;
        /* fio does not clean up jobs that end before they start. */
        if (!member->has_ended && !is_cancelled && member->td->runstate < TD_EXITED)
            is_needed = true;
    }
    if (!is_needed)
        close_session(session);
}

/* ---- Jobs ---- */

/* Whether fio's structures are those of the headers that this file was compiled with. */
static bool has_same_layout(const struct thread_data *td)
{
    unsigned int number = td->thread_number;

    return td->io_ops == &ioengine && number >= 1 && number <= thread_number &&
           tnumber_to_td(number - 1) == td;
}

/* Fails if the volume does not support a job's block sizes in one direction. */
static int check_blocks(const struct thread_data *td, enum fio_ddir ddir,
                        unsigned long long longest, const struct session *session)
{
    unsigned long long least = td->o.min_bs[ddir], most = td->o.max_bs[ddir];
    unsigned int block = session->geometry.logical_block;

    if (least % block || most % block) {
        log_err("rtrs: %s: bs=%llu is not a multiple of the logical block size, %u bytes\n",
                td->o.name, least % block ? least : most, block);
        return -EINVAL;
    }
    if (most > longest) {
        log_err("rtrs: %s: bs=%llu is too large; the volume takes up to %llu bytes\n", td->o.name,
                most, longest);
        return -EINVAL;
    }
    return 0;
}

/* Fails if the volume cannot do what a job asks for. */
static int check_job(const struct thread_data *td, const struct session *session)
{
    const struct rtrs_geometry *geometry = &session->geometry;
    bool has_fua = geometry->flags & RTRS_HAS_FUA || !(geometry->flags & RTRS_WRITE_CACHE);
    unsigned long long io_max = rtrs_queue_io_max(session->slots[0].queue);
    const char *why = NULL;

    if (td->o.nr_files > 1 || td->files_index > 1)
        why = "a job uses one volume; use nrfiles=1 and no filename";
    else if (geometry->size == 0)
        why = "the volume has no size";
    else if (writes(td) && geometry->flags & RTRS_READ_ONLY)
        why = "the volume is read-only";
    else if (td_trim(td) && !(geometry->flags & RTRS_HAS_DISCARD))
        why = "discards have no effect on this volume";
    else if (td_write(td) && td->o.sync_io && !has_fua)
        why = "sync needs FUA, which the server does not offer; use fsync=1";
    if (why) {
        log_err("rtrs: %s: %s\n", td->o.name, why);
        return -EINVAL;
    }
    if (td_trim(td) && check_blocks(td, DDIR_TRIM, geometry->discard_max, session))
        return -EINVAL;
    if (td_write(td) && check_blocks(td, DDIR_WRITE, io_max, session))
        return -EINVAL;
    return td_read(td) ? check_blocks(td, DDIR_READ, io_max, session) : 0;
}

/* Adds a job to its open session. */
static int join_session(struct thread_data *td, struct session *session)
{
    struct job *job;
    int status = session->status ? session->status : check_job(td, session);

    if (status)
        return status;
    job = calloc(1, sizeof *job);
    if (!job)
        return -ENOMEM;
    if (!td->files_index) {
        add_file(td, "rtrs", 0, 0);
        td->o.nr_files = td->o.nr_files ? td->o.nr_files : 1;
        td->o.open_files++;
    }
    td->files[0]->real_file_size = session->geometry.size;
    job->session = session;
    job->depth = td->o.iodepth;
    job->write_flags = td->o.sync_io ? RTRS_FUA : 0;
    td->io_ops_data = job;
    return 0;
}

static int engine_setup(struct thread_data *td)
{
    struct session *session;
    int status = -ENOMEM;

    if (!has_same_layout(td)) {
        log_err("rtrs: this engine was built for another version of fio; run build.sh again\n");
        return 1;
    }
    /* A forked child cannot use the session. */
    td->o.use_thread = 1;
    pthread_mutex_lock(&lock);
    session = find_session(td);
    if (!session)
        session = create_session(td);
    if (session) {
        status = join_session(td, session);
        if (status)
            leave_session(session, td);
    }
    pthread_mutex_unlock(&lock);
    if (status)
        td_verror(td, -status, "engine_setup");
    return status ? 1 : 0;
}

/* Takes a queue for a job that starts. */
static int engine_init(struct thread_data *td)
{
    struct job *job = td->io_ops_data;

    if (!job) {
        /* fio would set jobs up while others run. */
        log_err("rtrs: create_serialize=0 is not possible\n");
        td_verror(td, EINVAL, "engine_init");
        return 1;
    }
    job->done = calloc(job->depth, sizeof *job->done);
    if (!job->done) {
        td_verror(td, ENOMEM, "engine_init");
        return 1;
    }
    pthread_mutex_lock(&lock);
    for (unsigned int at = 0; !job->slot && at < job->session->slot_count; at++) {
        struct slot *slot = &job->session->slots[at];

        if (!slot->is_taken) {
            slot->is_taken = true;
            job->slot = slot;
        }
    }
    pthread_mutex_unlock(&lock);
    if (!job->slot) {
        log_err("rtrs: %s: all %u queues of the session are in use; see the setting queues\n",
                td->o.name, job->session->slot_count);
        td_verror(td, EBUSY, "engine_init");
        return 1;
    }
    return 0;
}

static void engine_cleanup(struct thread_data *td)
{
    struct job *job = td->io_ops_data;
    int inflight = 0;

    if (!job)
        return;
    pthread_mutex_lock(&lock);
    if (job->slot)
        inflight = check("count requests", rtrs_queue_inflight(job->slot->queue));
    if (inflight)
        log_err("rtrs: %s: ends with requests in flight; its queue is not used again\n",
                td->o.name);
    else if (job->slot)
        job->slot->is_taken = false;
    leave_session(job->session, td);
    pthread_mutex_unlock(&lock);
    free(job->done);
    free(job);
    td->io_ops_data = NULL;
}

/* ---- IO ---- */

static int submit(const struct job *job, struct io_u *io_u)
{
    rtrs_queue *queue = job->slot->queue;

    switch (io_u->ddir) {
    case DDIR_READ:
        return rtrs_submit_read(queue, io_u->xfer_buf, io_u->xfer_buflen, io_u->offset, 0, io_u);
    case DDIR_WRITE:
        return rtrs_submit_write(queue, io_u->xfer_buf, io_u->xfer_buflen, io_u->offset,
                                 job->write_flags, io_u);
    case DDIR_TRIM:
        return rtrs_submit_discard(queue, io_u->offset, io_u->xfer_buflen, 0, io_u);
    default: /* one of the syncs */
        return rtrs_submit_flush(queue, 0, io_u);
    }
}

static enum fio_q_status engine_queue(struct thread_data *td, struct io_u *io_u)
{
    struct job *job = td->io_ops_data;
    int status;

    fio_ro_check(td, io_u);
    if (!ddir_rw(io_u->ddir) && !ddir_sync(io_u->ddir)) {
        io_u->error = EOPNOTSUPP;
        return FIO_Q_COMPLETED;
    }
    status = submit(job, io_u);
    if (status == 0)
        return FIO_Q_QUEUED;
    if (status == -EAGAIN)
        return FIO_Q_BUSY;
    if (!job->has_reported) {
        job->has_reported = true;
        check("submit a request", status);
    }
    io_u->error = -status;
    io_u->resid = io_u->xfer_buflen;
    return FIO_Q_COMPLETED;
}

static int engine_getevents(struct thread_data *td, unsigned int least, unsigned int most,
                            const struct timespec *t)
{
    struct job *job = td->io_ops_data;
    rtrs_queue *queue = job->slot->queue;
    uint32_t wait = t ? (uint32_t)(t->tv_sec * 1000 + (t->tv_nsec + 999999) / 1000000) : WAIT_MS;
    unsigned int count = 0;

    most = min(most, job->depth);
    least = min(least, most);
    do {
        unsigned int missing = least > count ? least - count : 0;
        int found = rtrs_poll(queue, missing, most - count, wait, job->done + count);

        if (check("wait for requests", found) < 0)
            return found;
        count += found;
        /* Without a timeout, waits as long as the session keeps the requests. */
    } while (!t && count < least && rtrs_queue_inflight(queue) > 0);
    return count;
}

static struct io_u *engine_event(struct thread_data *td, int event)
{
    const struct job *job = td->io_ops_data;
    const struct rtrs_completion *done = &job->done[event];
    struct io_u *io_u = done->user_data;

    io_u->error = -done->result;
    io_u->resid = done->result ? io_u->xfer_buflen : 0;
    return io_u;
}

/* ---- Files: a job has one, which is the volume ---- */

static int ignore_file(struct thread_data *td, struct fio_file *f)
{
    (void)td;
    (void)f;
    return 0;
}

static struct fio_option options[] = {
    {
        .name = "uri",
        .lname = "URI of the volume",
        .type = FIO_OPT_STR_STORE,
        .off1 = offsetof(struct engine_options, uri),
        .help = "SCHEME://HOST[:PORT]/EXPORT[?SETTING=VALUE&...]",
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = "rtrs_set",
        .lname = "Settings of the session",
        .type = FIO_OPT_STR_STORE,
        .off1 = offsetof(struct engine_options, set),
        .help = "SETTING=VALUE,... in addition to those of the URI",
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = NULL,
    },
};

/* fio looks up the engine by this name. */
struct ioengine_ops ioengine = {
    .name = "rtrs",
    .version = FIO_IOOPS_VERSION,
    .flags = FIO_DISKLESSIO | FIO_NOEXTEND | FIO_NODISKUTIL,
    .setup = engine_setup,
    .init = engine_init,
    .cleanup = engine_cleanup,
    .queue = engine_queue,
    .getevents = engine_getevents,
    .event = engine_event,
    .open_file = ignore_file,
    .close_file = ignore_file,
    .invalidate = ignore_file,
    .unlink_file = ignore_file,
    .options = options,
    .option_struct_size = sizeof(struct engine_options),
};
