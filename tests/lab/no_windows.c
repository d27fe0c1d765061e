/* Removes memory windows from RDMA devices, for the lab: loaded into a program with LD_PRELOAD, it
 * makes every device that the program opens behave as if its provider did not implement them. The
 * device's attributes still report windows. With NO_WINDOWS=bind, only the binds are missing.
 *
 *   gcc -shared -fPIC -o no_windows.so no_windows.c
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

static int (*real_post_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);

static struct ibv_mw *no_alloc(struct ibv_pd *pd, enum ibv_mw_type type)
{
    (void)pd, (void)type;
    errno = EOPNOTSUPP;
    return NULL;
}

static int no_bind(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
    (void)qp, (void)mw, (void)bind;
    return EOPNOTSUPP;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    for (struct ibv_send_wr *at = wr; at; at = at->next) {
        if (at->opcode == IBV_WR_BIND_MW) {
            *bad = at;
            return EOPNOTSUPP;
        }
    }
    return real_post_send(qp, wr, bad);
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct ibv_context *(*open)(struct ibv_device *) = dlsym(RTLD_NEXT, "ibv_open_device");
    struct ibv_context *context = open ? open(device) : NULL;
    const char *mode = getenv("NO_WINDOWS");

    if (!context)
        return NULL;
    if (!mode || strcmp(mode, "bind") != 0)
        context->ops.alloc_mw = no_alloc;
    context->ops.bind_mw = no_bind;
    real_post_send = context->ops.post_send;
    context->ops.post_send = post_send;
    return context;
}
