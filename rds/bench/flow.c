/* One end of a stream of messages or of a ping-pong, over AF_RDS or over TCP.
 *
 *   flow rds|tcp receive|pong|send|ping OWN PEER PORT LENGTH SECONDS CPU
 *
 * OWN and PEER are IPv4 addresses; the end that receives or answers has PORT, and prints `ready`.
 * `receive` prints messages per second, `ping` microseconds per round trip; `send` and `pong` run
 * until they are killed. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#ifndef AF_RDS
#define AF_RDS 21
#endif

static char buffer[8 << 20];
static struct sockaddr_in peer;
static size_t length;
static int is_rds;

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static struct sockaddr_in address(const char *text, int port)
{
    struct sockaddr_in found = {.sin_family = AF_INET, .sin_port = htons(port)};

    if (inet_pton(AF_INET, text, &found.sin_addr) != 1)
        errx(2, "not an IPv4 address: '%s'", text);
    return found;
}

static void pin(int cpu)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) < 0)
        err(1, "cannot run on CPU %d", cpu);
}

/* Returns a socket of this end, connected for TCP. */
static int open_end(const char *own, int port, int is_server)
{
    struct sockaddr_in mine = address(own, is_server ? port : 0);
    int one = 1, end;
    int fd = is_rds ? socket(AF_RDS, SOCK_SEQPACKET, 0) : socket(AF_INET, SOCK_STREAM, 0);

    if (fd < 0)
        err(1, "socket");
    if (is_rds)
        mine.sin_port = htons(is_server ? port : port + 1);
    else if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) < 0)
        err(1, "SO_REUSEADDR");
    if (bind(fd, (struct sockaddr *)&mine, sizeof mine) < 0)
        err(1, "bind to %s", own);
    if (!is_rds && is_server && listen(fd, 1) < 0)
        err(1, "listen");
    if (is_server) {
        puts("ready");
        fflush(stdout);
    }
    if (is_rds)
        return fd;
    end = fd;
    if (is_server)
        end = accept(fd, NULL, NULL);
    else if (connect(fd, (struct sockaddr *)&peer, sizeof peer) < 0)
        err(1, "connect");
    if (end < 0)
        err(1, "accept");
    if (setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) < 0)
        err(1, "TCP_NODELAY");
    return end;
}

static void put(int fd)
{
    ssize_t sent = is_rds
        ? sendto(fd, buffer, length, 0, (struct sockaddr *)&peer, sizeof peer)
        : send(fd, buffer, length, 0);

    if (sent != (ssize_t)length)
        err(1, "send: %zd of %zu bytes", sent, length);
}

static void get(int fd)
{
    socklen_t size = sizeof peer;
    ssize_t got = is_rds
        ? recvfrom(fd, buffer, length, 0, (struct sockaddr *)&peer, &size)
        : recv(fd, buffer, length, MSG_WAITALL);

    if (got != (ssize_t)length)
        err(1, "receive: %zd of %zu bytes", got, length);
}

int main(int argc, char **argv)
{
    int fd, port, is_server, is_stream;
    unsigned long count = 0;
    double begin, seconds;

    if (argc != 9)
        errx(2, "usage: flow rds|tcp receive|pong|send|ping OWN PEER PORT LENGTH SECONDS CPU");
    is_rds = !strcmp(argv[1], "rds");
    is_server = !strcmp(argv[2], "receive") || !strcmp(argv[2], "pong");
    is_stream = !strcmp(argv[2], "receive") || !strcmp(argv[2], "send");
    port = atoi(argv[5]);
    peer = address(argv[4], is_server ? port + 1 : port);
    length = strtoul(argv[6], NULL, 10);
    seconds = atof(argv[7]);
    if (length < 1 || length > sizeof buffer)
        errx(2, "not a length from 1 to %zu: '%s'", sizeof buffer, argv[6]);
    pin(atoi(argv[8]));
    fd = open_end(argv[3], port, is_server);
    if (is_stream && !is_server)
        for (;;)
            put(fd);
    if (!is_stream && is_server)
        for (;;) {
            get(fd);
            put(fd);
        }
    if (is_stream)
        get(fd);
    for (begin = now(); now() - begin < seconds; count++) {
        if (!is_stream)
            put(fd);
        get(fd);
    }
    seconds = now() - begin;
    printf("%.3f\n", is_stream ? count / seconds : seconds * 1e6 / count);
    return 0;
}
