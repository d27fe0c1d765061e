/* Helpers for the checks in api.c: output, addresses, sockets, options. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAMILY = 21, SOL_RDS_LEVEL = 276 };
/* Options, then types of control messages. */
enum { CANCEL = 1, GET_MR, FREE_MR, RECVERR = 5, MONITOR, GET_MR_FOR_DEST, TRANSPORT,
       LATENCY = 10 };
enum { RDMA_ARGS = 1, RDMA_DEST, RDMA_MAP, RDMA_STATUS, CONG_UPDATE, ATOMIC_FADD, COOKIE = 12 };
enum { TCP = 2, SET_TOS = 0x89e0, GET_TOS = 0x89e1, ZEROCOPY = 0x4000000, SO_STAMP_NEW = 63 };
enum { PORT = 4200, SLOW_PORT = 4300, SECONDS_MAX = 30 };

static const char *own, *peer, *namespace;
/* No node has this address. */
static const char *const nobody = "192.0.2.77";
static char big[2 << 20];

static void show(const char *name, long result)
{
    if (result < 0)
        printf("%s %s\n", name, strerrorname_np(errno));
    else
        printf("%s %ld\n", name, result);
    fflush(stdout);
}

#define CHECK(name, call) show(name, (errno = 0, (long)(call)))
/* For values that may be negative. */
#define VALUE(name, value) printf("%s %ld\n", name, (long)(value))

static void need(int is_true, const char *what)
{
    if (is_true)
        return;
    fprintf(stderr, "api: cannot %s: %s\n", what, strerror(errno));
    exit(1);
}

static struct sockaddr_in at(const char *address, int port)
{
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
    inet_pton(AF_INET, address, &to.sin_addr);
    return to;
}

static struct sockaddr_in6 at6(const char *address, int port)
{
    struct sockaddr_in6 to = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
    inet_pton(AF_INET6, address, &to.sin6_addr);
    return to;
}

static int fresh(void)
{
    int fd = socket(FAMILY, SOCK_SEQPACKET, 0);
    need(fd >= 0, "create a socket");
    return fd;
}

static long bind4(int fd, const char *address, int port)
{
    struct sockaddr_in to = at(address, port);
    return bind(fd, (void *)&to, sizeof to);
}

static long bind6(int fd, const char *address)
{
    struct sockaddr_in6 to = at6(address, 0);
    return bind(fd, (void *)&to, sizeof to);
}

static long connect4(int fd, const char *address, int port)
{
    struct sockaddr_in to = at(address, port);
    return connect(fd, (void *)&to, sizeof to);
}

static long connect6(int fd, const char *address)
{
    struct sockaddr_in6 to = at6(address, PORT);
    return connect(fd, (void *)&to, sizeof to);
}

static long send4(int fd, const char *address, int port, size_t size, int flags)
{
    struct sockaddr_in to = at(address, port);
    return sendto(fd, big, size, flags, (void *)&to, sizeof to);
}

static long send6(int fd, const char *address)
{
    struct sockaddr_in6 to = at6(address, PORT);
    return sendto(fd, big, 1, 0, (void *)&to, sizeof to);
}

static long set(int fd, int level, int name, int value)
{
    return setsockopt(fd, level, name, &value, sizeof value);
}

static long set_bytes(int fd, int level, int name, size_t size)
{
    static const char zeros[256];
    return setsockopt(fd, level, name, zeros, size);
}

static long get(int fd, int level, int name)
{
    int value = 0;
    socklen_t size = sizeof value;
    return getsockopt(fd, level, name, &value, &size) < 0 ? -1 : value;
}

static void set_limit(int fd, int seconds, int millis)
{
    struct timeval limit = { seconds, millis * 1000 };
    need(!setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), "limit a receive");
}

/* Returns a bound socket with a receive timeout. */
static int bound(const char *address, int port)
{
    int here = -1, there, fd;
    if (address == peer && namespace) {
        need((here = open("/proc/self/ns/net", O_RDONLY)) >= 0, "open this namespace");
        need((there = open(namespace, O_RDONLY)) >= 0, "open the namespace");
        need(!setns(there, CLONE_NEWNET), "enter the namespace");
        close(there);
    }
    fd = fresh();
    if (here >= 0) {
        need(!setns(here, CLONE_NEWNET), "leave the namespace");
        close(here);
    }
    need(!bind4(fd, address, port), "bind a socket");
    set_limit(fd, SECONDS_MAX, 0);
    return fd;
}

static int events(int fd, int wanted, int millis)
{
    struct pollfd entry = { .fd = fd, .events = wanted };
    need(poll(&entry, 1, millis) >= 0, "poll");
    return entry.revents;
}
