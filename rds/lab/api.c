/* Checks of the RDS socket API: prints `NAME RESULT` for each; the result is an error or a value.
 * The same program runs over the kernel's RDS and over librds_preload.so, and the outputs are
 * compared (scenario rds-api, rds/tests/system/api.rs). A result must not depend on time.
 *
 *   gcc -o api api.c && ./api ADDRESS PEER [NAMESPACE]
 *
 * ADDRESS and PEER are addresses of this host. NAMESPACE is the file of the network namespace for
 * sockets at PEER: the kernel never connects two addresses of one namespace over TCP.
 */
#include "api.h"

static void sockets(void)
{
    int pair[2];
    CHECK("socket", socket(FAMILY, SOCK_SEQPACKET, 0) >= 0);
    CHECK("socket_flags", socket(FAMILY, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0) >= 0);
    CHECK("socket_dgram", socket(FAMILY, SOCK_DGRAM, 0));
    CHECK("socket_stream", socket(FAMILY, SOCK_STREAM, 0));
    CHECK("socket_type_11", socket(FAMILY, 11, 0));
    CHECK("socket_unknown_flag", socket(FAMILY, SOCK_SEQPACKET | 0x40, 0));
    CHECK("socket_protocol", socket(FAMILY, SOCK_SEQPACKET, 5));
    CHECK("socketpair", socketpair(FAMILY, SOCK_SEQPACKET, 0, pair));
    CHECK("socketpair_dgram", socketpair(FAMILY, SOCK_DGRAM, 0, pair));
}

static void unbound(void)
{
    struct sockaddr_in to = at(peer, PORT);
    socklen_t size = sizeof to;
    unsigned char tos[64] = { 0 };
    int value = -2, fd = fresh();
    CHECK("unbound_send_to", send4(fd, peer, PORT, 1, 0));
    CHECK("unbound_send", send(fd, "x", 1, 0));
    CHECK("unbound_send_to_any", send4(fd, "0.0.0.0", PORT, 1, 0));
    CHECK("unbound_recv", recv(fd, big, 10, MSG_DONTWAIT));
    CHECK("unbound_recv_oob", recv(fd, big, 10, MSG_OOB));
    set_limit(fd, 0, 50);
    CHECK("unbound_recv_limit", recv(fd, big, 10, 0));
    set(fd, SOL_RDS_LEVEL, MONITOR, 1);
    VALUE("unbound_poll", events(fd, POLLIN | POLLOUT, 0));
    CHECK("unbound_cancel", setsockopt(fd, SOL_RDS_LEVEL, CANCEL, &to, sizeof to));
    CHECK("unbound_get_mr", set_bytes(fd, SOL_RDS_LEVEL, GET_MR, 32));
    CHECK("unbound_set_tos", ioctl(fd, SET_TOS, tos));
    CHECK("unbound_get_tos", ioctl(fd, GET_TOS, tos));
    size = sizeof value;
    CHECK("unbound_transport", getsockopt(fd, SOL_RDS_LEVEL, TRANSPORT, &value, &size));
    VALUE("unbound_transport_value", value);
    size = sizeof to;
    CHECK("unbound_getpeername", getpeername(fd, (void *)&to, &size));
    CHECK("unbound_getsockname", getsockname(fd, (void *)&to, &size));
    VALUE("unbound_family", to.sin_family);
    VALUE("unbound_size", size);
    close(fd);
}

static void connecting(void)
{
    struct sockaddr_in to = at(peer, PORT);
    socklen_t size = sizeof to;
    int fd = fresh();
    CHECK("connect_any", connect4(fd, "0.0.0.0", PORT));
    CHECK("connect_broadcast", connect4(fd, "255.255.255.255", PORT));
    CHECK("connect_multicast", connect4(fd, "224.0.0.1", PORT));
    CHECK("connect6_any", connect6(fd, "::"));
    CHECK("connect6_multicast", connect6(fd, "ff02::1"));
    CHECK("connect6_mapped_any", connect6(fd, "::ffff:0.0.0.0"));
    CHECK("connect6_link_local", connect6(fd, "fe80::1"));
    CHECK("connect_short", connect(fd, (void *)&to, 8));
    CHECK("connect_one_byte", connect(fd, (void *)&to, 1));
    CHECK("connect_long", connect(fd, (void *)big, 129));
    CHECK("connect_null", connect(fd, NULL, sizeof to));
    to.sin_family = AF_UNIX;
    CHECK("connect_unix", connect(fd, (void *)&to, sizeof to));
    to.sin_family = AF_UNSPEC;
    CHECK("connect_unspecified", connect(fd, (void *)&to, sizeof to));
    CHECK("connect", connect4(fd, peer, PORT));
    CHECK("connect_getpeername", getpeername(fd, (void *)&to, &size));
    VALUE("connect_port", ntohs(to.sin_port));
    CHECK("connect_again", connect4(fd, peer, PORT + 1));
    CHECK("connect_getpeername_again", getpeername(fd, (void *)&to, &size));
    VALUE("connect_port_again", ntohs(to.sin_port));
    CHECK("connect_getsockname", getsockname(fd, (void *)&to, &size));
    VALUE("connect_family", to.sin_family);
    CHECK("getsockname_null", getsockname(fd, NULL, &size));
    CHECK("getsockname_null_size", getsockname(fd, (void *)&to, NULL));
    size = -1;
    CHECK("getsockname_negative_size", getsockname(fd, (void *)&to, &size));
    size = 4;
    CHECK("getsockname_short", getsockname(fd, (void *)&to, &size));
    VALUE("getsockname_short_size", size);
    CHECK("listen", listen(fd, 1));
    CHECK("accept", accept(fd, NULL, NULL));
    CHECK("shutdown", shutdown(fd, SHUT_RDWR));
    CHECK("shutdown_unknown", shutdown(fd, 7));
    close(fd);
}

static void binding(void)
{
    struct sockaddr_in to = at(own, PORT);
    struct sockaddr_in6 mapped;
    socklen_t size = sizeof to;
    char text[64];
    int fd = fresh(), other;
    CHECK("bind_any", bind4(fd, "0.0.0.0", 0));
    CHECK("bind_broadcast", bind4(fd, "255.255.255.255", 0));
    CHECK("bind_multicast", bind4(fd, "224.0.0.1", 0));
    CHECK("bind_foreign", bind4(fd, nobody, 0));
    CHECK("bind_port_1", bind4(fd, own, 1));
    CHECK("bind6_any", bind6(fd, "::"));
    CHECK("bind6_link_local", bind6(fd, "fe80::1"));
    CHECK("bind_short", bind(fd, (void *)&to, 8));
    CHECK("bind_null", bind(fd, NULL, sizeof to));
    to.sin_family = AF_UNIX;
    CHECK("bind_unix", bind(fd, (void *)&to, sizeof to));
    CHECK("bind", bind4(fd, own, 0));
    CHECK("bind_getsockname", getsockname(fd, (void *)&to, &size));
    VALUE("bind_port_chosen", ntohs(to.sin_port) > 1);
    CHECK("bind_again", bind4(fd, own, 0));
    other = fresh();
    CHECK("bind_in_use", bind4(other, own, ntohs(to.sin_port)));
    CHECK("bind_other_port", bind4(other, own, 0));
    close(other);
    close(fd);
    fd = fresh();
    snprintf(text, sizeof text, "::ffff:%s", own);
    mapped = at6(text, 0);
    CHECK("bind6_mapped", bind(fd, (void *)&mapped, sizeof mapped));
    CHECK("bind6_mapped_getsockname", getsockname(fd, (void *)&to, &size));
    VALUE("bind6_mapped_family", to.sin_family);
    close(fd);
}

static void transport(void)
{
    long long wide = TCP;
    int fd = fresh();
    CHECK("transport_unknown", set(fd, SOL_RDS_LEVEL, TRANSPORT, 99));
    CHECK("transport_negative", set(fd, SOL_RDS_LEVEL, TRANSPORT, -1));
    CHECK("transport_long", setsockopt(fd, SOL_RDS_LEVEL, TRANSPORT, &wide, sizeof wide));
    CHECK("transport_short", setsockopt(fd, SOL_RDS_LEVEL, TRANSPORT, &wide, 2));
    CHECK("transport_null", setsockopt(fd, SOL_RDS_LEVEL, TRANSPORT, NULL, 4));
    CHECK("transport_tcp", set(fd, SOL_RDS_LEVEL, TRANSPORT, TCP));
    CHECK("transport_get", get(fd, SOL_RDS_LEVEL, TRANSPORT));
    CHECK("transport_twice", set(fd, SOL_RDS_LEVEL, TRANSPORT, TCP));
    CHECK("transport_bind_foreign", bind4(fd, nobody, 0));
    CHECK("transport_bind", bind4(fd, own, 0));
    CHECK("transport_get_bound", get(fd, SOL_RDS_LEVEL, TRANSPORT));
    CHECK("transport_bound", set(fd, SOL_RDS_LEVEL, TRANSPORT, TCP));
    close(fd);
    fd = bound(own, 0);
    CHECK("transport_default", get(fd, SOL_RDS_LEVEL, TRANSPORT));
    close(fd);
}

static void socket_options(void)
{
    struct { int pid, uid, gid; } owner = { 1, 1, 1 };
    socklen_t size = sizeof owner;
    int fd = bound(own, 0);
    CHECK("so_type", get(fd, SOL_SOCKET, SO_TYPE));
    CHECK("so_domain", get(fd, SOL_SOCKET, SO_DOMAIN));
    CHECK("so_protocol", get(fd, SOL_SOCKET, SO_PROTOCOL));
    CHECK("so_error", get(fd, SOL_SOCKET, SO_ERROR));
    CHECK("so_acceptconn", get(fd, SOL_SOCKET, SO_ACCEPTCONN));
    CHECK("so_sndbuf_set", set(fd, SOL_SOCKET, SO_SNDBUF, 50000));
    CHECK("so_sndbuf", get(fd, SOL_SOCKET, SO_SNDBUF));
    CHECK("so_sndbuf_set_1", set(fd, SOL_SOCKET, SO_SNDBUF, 1));
    CHECK("so_sndbuf_least", get(fd, SOL_SOCKET, SO_SNDBUF));
    CHECK("so_sndbuf_short", setsockopt(fd, SOL_SOCKET, SO_SNDBUF, big, 2));
    CHECK("so_rcvbuf_set", set(fd, SOL_SOCKET, SO_RCVBUF, 50000));
    CHECK("so_rcvbuf", get(fd, SOL_SOCKET, SO_RCVBUF));
    CHECK("so_rcvbuf_set_1", set(fd, SOL_SOCKET, SO_RCVBUF, 1));
    CHECK("so_rcvbuf_least", get(fd, SOL_SOCKET, SO_RCVBUF));
    CHECK("so_reuseaddr", set(fd, SOL_SOCKET, SO_REUSEADDR, 1));
    CHECK("so_passcred", set(fd, SOL_SOCKET, SO_PASSCRED, 1));
    CHECK("so_peek_off_set", set(fd, SOL_SOCKET, SO_PEEK_OFF, 1));
    CHECK("so_peek_off", get(fd, SOL_SOCKET, SO_PEEK_OFF));
    CHECK("so_zerocopy_2", set(fd, SOL_SOCKET, SO_ZEROCOPY, 2));
    CHECK("so_zerocopy_set", set(fd, SOL_SOCKET, SO_ZEROCOPY, 1));
    CHECK("so_zerocopy", get(fd, SOL_SOCKET, SO_ZEROCOPY));
    CHECK("so_timestamp_set", set(fd, SOL_SOCKET, SO_TIMESTAMP, 1));
    CHECK("so_timestamp", get(fd, SOL_SOCKET, SO_TIMESTAMP));
    CHECK("so_timestamp_short", setsockopt(fd, SOL_SOCKET, SO_TIMESTAMP, big, 2));
    CHECK("so_peercred", getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &owner, &size));
    VALUE("so_peercred_pid", owner.pid);
    VALUE("so_peercred_uid", owner.uid);
    CHECK("so_negative_size", setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, big, -1));
    CHECK("tcp_option", set(fd, IPPROTO_TCP, TCP_NODELAY, 1));
    CHECK("tcp_option_get", get(fd, IPPROTO_TCP, TCP_NODELAY));
    CHECK("ip_option", set(fd, IPPROTO_IP, IP_TOS, 1));
    CHECK("ip_option_get", get(fd, IPPROTO_IP, IP_TOS));
    close(fd);
    fd = bound(own, 0);
    CHECK("so_sndbuf_default", get(fd, SOL_SOCKET, SO_SNDBUF));
    CHECK("so_rcvbuf_default", get(fd, SOL_SOCKET, SO_RCVBUF));
    close(fd);
}

static void rds_options(void)
{
    struct sockaddr_in to = at(nobody, PORT);
    char traces[4] = { 3, 0, 1, 2 };
    int value, fd = bound(own, 0);
    socklen_t size = 3;
    CHECK("recverr_default", get(fd, SOL_RDS_LEVEL, RECVERR));
    CHECK("recverr_set", set(fd, SOL_RDS_LEVEL, RECVERR, 7));
    CHECK("recverr", get(fd, SOL_RDS_LEVEL, RECVERR));
    CHECK("recverr_get_short", getsockopt(fd, SOL_RDS_LEVEL, RECVERR, &value, &size));
    size = 8;
    CHECK("recverr_get_long", getsockopt(fd, SOL_RDS_LEVEL, RECVERR, big, &size));
    VALUE("recverr_size", size);
    CHECK("recverr_get_null", getsockopt(fd, SOL_RDS_LEVEL, RECVERR, NULL, &size));
    CHECK("recverr_get_null_size", getsockopt(fd, SOL_RDS_LEVEL, RECVERR, &value, NULL));
    CHECK("recverr_short", setsockopt(fd, SOL_RDS_LEVEL, RECVERR, &value, 2));
    CHECK("recverr_null", setsockopt(fd, SOL_RDS_LEVEL, RECVERR, NULL, 4));
    CHECK("recverr_negative_size", setsockopt(fd, SOL_RDS_LEVEL, RECVERR, &value, -1));
    CHECK("monitor_set", set(fd, SOL_RDS_LEVEL, MONITOR, 1));
    CHECK("monitor_get", get(fd, SOL_RDS_LEVEL, MONITOR));
    CHECK("monitor_short", setsockopt(fd, SOL_RDS_LEVEL, MONITOR, &value, 2));
    CHECK("unknown_set", set(fd, SOL_RDS_LEVEL, 77, 1));
    CHECK("unknown_get", get(fd, SOL_RDS_LEVEL, 77));
    CHECK("rds_timestamp", set(fd, SOL_RDS_LEVEL, SO_TIMESTAMP, 1));
    CHECK("rds_timestamp_new", set(fd, SOL_RDS_LEVEL, SO_STAMP_NEW, 1));
    CHECK("rds_timestamp_ns", set(fd, SOL_RDS_LEVEL, SO_TIMESTAMPNS, 1));
    CHECK("rds_timestamp_get", get(fd, SOL_RDS_LEVEL, SO_TIMESTAMP));
    CHECK("rds_timestamp_short", setsockopt(fd, SOL_RDS_LEVEL, SO_TIMESTAMP, &value, 2));
    CHECK("latency_short", setsockopt(fd, SOL_RDS_LEVEL, LATENCY, traces, 3));
    CHECK("latency", setsockopt(fd, SOL_RDS_LEVEL, LATENCY, traces, 4));
    traces[1] = 3;
    CHECK("latency_position", setsockopt(fd, SOL_RDS_LEVEL, LATENCY, traces, 4));
    traces[0] = 4;
    CHECK("latency_count", setsockopt(fd, SOL_RDS_LEVEL, LATENCY, traces, 4));
    CHECK("latency_get", get(fd, SOL_RDS_LEVEL, LATENCY));
    CHECK("get_mr", set_bytes(fd, SOL_RDS_LEVEL, GET_MR, 32));
    CHECK("get_mr_size", set_bytes(fd, SOL_RDS_LEVEL, GET_MR, 31));
    CHECK("get_mr_for_dest", set_bytes(fd, SOL_RDS_LEVEL, GET_MR_FOR_DEST, 160));
    CHECK("get_mr_for_dest_size", set_bytes(fd, SOL_RDS_LEVEL, GET_MR_FOR_DEST, 32));
    CHECK("free_mr", set_bytes(fd, SOL_RDS_LEVEL, FREE_MR, 16));
    CHECK("cancel", setsockopt(fd, SOL_RDS_LEVEL, CANCEL, &to, sizeof to));
    CHECK("cancel_short", setsockopt(fd, SOL_RDS_LEVEL, CANCEL, &to, 8));
    to.sin_family = AF_UNSPEC;
    CHECK("cancel_no_family", setsockopt(fd, SOL_RDS_LEVEL, CANCEL, &to, sizeof to));
    CHECK("cancel_null", setsockopt(fd, SOL_RDS_LEVEL, CANCEL, NULL, sizeof to));
    close(fd);
}

static void requests(void)
{
    unsigned char tos[64] = { 3 };
    int value = 1, fd = bound(own, 0);
    CHECK("set_tos", ioctl(fd, SET_TOS, tos));
    CHECK("set_tos_null", ioctl(fd, SET_TOS, NULL));
    tos[0] = 9;
    CHECK("get_tos", ioctl(fd, GET_TOS, tos));
    VALUE("get_tos_value", tos[0]);
    CHECK("get_tos_null", ioctl(fd, GET_TOS, NULL));
    CHECK("fionread", ioctl(fd, FIONREAD, &value));
    CHECK("fionbio", ioctl(fd, FIONBIO, &value));
    CHECK("recv_nonblocking", recv(fd, big, 1, 0));
    CHECK("send_nonblocking", send4(fd, peer, PORT + 1, 1, 0));
    CHECK("set_tos_after_send", ioctl(fd, SET_TOS, tos));
    CHECK("outq", ioctl(fd, TIOCOUTQ, &value));
    close(fd);
}

static void info(const char *name, int fd, int option)
{
    socklen_t size = sizeof big;
    CHECK(name, getsockopt(fd, SOL_RDS_LEVEL, option, big, &size));
}

static void infos(void)
{
    socklen_t size = 0;
    int fd = bound(own, 0);
    CHECK("info_size", getsockopt(fd, SOL_RDS_LEVEL, 10000, NULL, &size));
    VALUE("info_size_is_known", size > 0 && size % 40 == 0);
    size = -1;
    CHECK("info_negative_size", getsockopt(fd, SOL_RDS_LEVEL, 10000, big, &size));
    info("info_counters", fd, 10000);
    info("info_connections", fd, 10001);
    info("info_flows", fd, 10002);
    info("info_send_messages", fd, 10003);
    info("info_retrans_messages", fd, 10004);
    info("info_recv_messages", fd, 10005);
    info("info_sockets", fd, 10006);
    info("info_tcp_sockets", fd, 10007);
    info("info_connection_stats", fd, 10009);
    info("info_iwarp_connections", fd, 10010);
    info("info6_connections", fd, 10011);
    info("info6_send_messages", fd, 10012);
    info("info6_retrans_messages", fd, 10013);
    info("info6_recv_messages", fd, 10014);
    info("info6_sockets", fd, 10015);
    info("info6_tcp_sockets", fd, 10016);
    info("info_after_last", fd, 10018);
    close(fd);
    fd = fresh();
    info("info_unbound", fd, 10006);
    close(fd);
}

static void sending(int from, int to)
{
    struct sockaddr_in address = at(peer, PORT);
    struct iovec parts[2] = { { "ab", 2 }, { "cde", 3 } };
    struct mmsghdr many[2] = { { { .msg_iov = parts, .msg_iovlen = 2 }, 0 } };
    char text[64];
    long accepted;
    CHECK("send_no_destination", send(from, "x", 1, 0));
    CHECK("send_nosignal", send4(from, peer, PORT, 1, MSG_NOSIGNAL));
    CHECK("send_oob", send4(from, peer, PORT, 1, MSG_OOB));
    CHECK("send_more", send4(from, peer, PORT, 1, MSG_MORE));
    CHECK("send_eor", send4(from, peer, PORT, 1, MSG_EOR));
    CHECK("send_dontroute", send4(from, peer, PORT, 1, MSG_DONTROUTE));
    CHECK("send_zerocopy_without_cookie", send4(from, peer, PORT, 1, ZEROCOPY));
    CHECK("send_to_any", send4(from, "0.0.0.0", PORT, 1, 0));
    CHECK("send_to_broadcast", send4(from, "255.255.255.255", PORT, 1, 0));
    CHECK("send_to_multicast", send4(from, "224.0.0.1", PORT, 1, 0));
    CHECK("send_to_v6", send6(from, "fd00::1"));
    CHECK("send_to_v6_any", send6(from, "::"));
    CHECK("send_to_v6_link_local", send6(from, "fe80::1"));
    CHECK("send_to_null_size", sendto(from, "x", 1, 0, (void *)&address, 0));
    CHECK("send_to_short", sendto(from, "x", 1, 0, (void *)&address, 8));
    CHECK("send_null", sendto(from, NULL, 1, 0, (void *)&address, sizeof address));
    address.sin_family = AF_UNSPEC;
    CHECK("send_to_unspecified", sendto(from, "x", 1, 0, (void *)&address, sizeof address));
    snprintf(text, sizeof text, "::ffff:%s", peer);
    CHECK("send_to_mapped", send6(from, text));
    CHECK("send_to_mapped_arrives", recv(to, big, 10, 0));
    CHECK("send_dontwait", send4(from, peer, PORT, 5, MSG_DONTWAIT));
    CHECK("send_dontwait_arrives", recv(to, big, 10, 0));
    CHECK("send_above_buffer", send4(from, peer, PORT, 106497, 0));
    CHECK("send_whole_buffer", send4(from, peer, PORT, 106496, 0));
    CHECK("send_whole_buffer_arrives", recv(to, big, sizeof big, 0));
    set(from, SOL_SOCKET, SO_SNDBUF, 2 << 20);
    set(to, SOL_SOCKET, SO_RCVBUF, 2 << 20);
    CHECK("send_1m", send4(from, peer, PORT, 1 << 20, 0));
    CHECK("send_1m_arrives", recv(to, big, sizeof big, 0));
    CHECK("send_above_1m", send4(from, peer, PORT, (1 << 20) + 1, 0));
    CHECK("send_empty", send4(from, peer, PORT, 0, 0));
    CHECK("send_empty_arrives", recv(to, big, 10, 0));
    CHECK("send_connect", connect4(from, peer, PORT));
    CHECK("send_connected", send(from, "abc", 3, 0));
    CHECK("send_connected_arrives", recv(to, big, 10, 0));
    CHECK("send_connected_null_size", sendto(from, "abcd", 4, 0, (void *)&address, 0));
    CHECK("send_connected_null_size_arrives", recv(to, big, 10, 0));
    CHECK("sendmmsg_one", sendmmsg(from, many, 1, 0));
    VALUE("sendmmsg_one_length", many[0].msg_len);
    CHECK("readv", readv(to, (struct iovec[]) { { big, 1 }, { big + 1, 9 } }, 2));
    many[1] = many[0];
    CHECK("sendmmsg", accepted = sendmmsg(from, many, 2, 0));
    while (accepted-- > 0)
        recv(to, big, 10, 0);
    CHECK("write", accepted = write(from, "abcd", 4));
    if (accepted > 0)
        recv(to, big, 10, 0);
}

static void receiving(int from, int to)
{
    struct sockaddr_in source;
    char control[64];
    struct iovec part = { big, 2 };
    struct msghdr message = { &source, sizeof source, &part, 1, control, sizeof control, 0 };
    socklen_t size = 4;
    send(from, "hello", 5, 0);
    CHECK("recvmsg", recvmsg(to, &message, 0));
    VALUE("recvmsg_flags", message.msg_flags);
    VALUE("recvmsg_name_size", message.msg_namelen);
    VALUE("recvmsg_family", source.sin_family);
    VALUE("recvmsg_control_size", message.msg_controllen);
    send(from, "hello", 5, 0);
    CHECK("recv_trunc", recv(to, big, 2, MSG_TRUNC));
    send(from, "hello", 5, 0);
    CHECK("recv_peek", recv(to, big, 9, MSG_PEEK));
    CHECK("recv_peek_again", recv(to, big, 9, MSG_PEEK));
    CHECK("recv_oob", recv(to, big, 9, MSG_OOB));
    CHECK("recv_error_queue", recv(to, big, 9, MSG_ERRQUEUE | MSG_DONTWAIT));
    CHECK("recv_waitall", recv(to, big, 9, MSG_WAITALL));
    send(from, "hello", 5, 0);
    CHECK("recv_no_room", recv(to, big, 0, 0));
    CHECK("recv_dontwait", recv(to, big, 9, MSG_DONTWAIT));
    send(from, "hello", 5, 0);
    CHECK("recvfrom_short", recvfrom(to, big, 9, 0, (void *)&source, &size));
    VALUE("recvfrom_short_size", size);
    send(from, "hello", 5, 0);
    CHECK("read", read(to, big, 2));
    set_limit(to, 0, 50);
    CHECK("recv_limit", recv(to, big, 9, 0));
    set_limit(to, SECONDS_MAX, 0);
    set(to, SOL_RDS_LEVEL, MONITOR, 1);
    VALUE("poll_idle", events(to, POLLIN | POLLOUT, 0));
    send(from, "hello", 5, 0);
    events(to, POLLIN, SECONDS_MAX * 1000);
    VALUE("poll_message", events(to, POLLIN | POLLOUT, 0));
    CHECK("poll_message_arrives", recv(to, big, 9, 0));
}

/* Sends a byte with a control message. */
static long send_control(int fd, int level, int kind, const void *bytes, size_t size)
{
    char control[CMSG_SPACE(128)] __attribute__((aligned(8))) = { 0 };
    struct iovec part = { "x", 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                              .msg_controllen = CMSG_SPACE(size) };
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = level;
    head->cmsg_type = kind;
    head->cmsg_len = CMSG_LEN(size);
    if (bytes)
        memcpy(CMSG_DATA(head), bytes, size);
    return sendmsg(fd, &message, 0);
}

static void controls(int from, int to)
{
    static uint64_t word;
    uint64_t vector[2] = { (uintptr_t)&word, 8 };
    uint64_t operation[7] = { 0, 0, 8, (uintptr_t)vector, 1, 0, 0 };
    uint64_t atomic[9] = { 0, (uintptr_t)&word, 0 };
    char control[16] __attribute__((aligned(8))) = { 1 };
    struct iovec part = { "x", 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                              .msg_controllen = sizeof control };
    CHECK("control_rdma", send_control(from, SOL_RDS_LEVEL, RDMA_ARGS, operation, 56));
    CHECK("control_rdma_empty", send_control(from, SOL_RDS_LEVEL, RDMA_ARGS, NULL, 56));
    CHECK("control_rdma_short", send_control(from, SOL_RDS_LEVEL, RDMA_ARGS, operation, 48));
    CHECK("control_rdma_dest", send_control(from, SOL_RDS_LEVEL, RDMA_DEST, NULL, 8));
    CHECK("control_rdma_map", send_control(from, SOL_RDS_LEVEL, RDMA_MAP, NULL, 32));
    CHECK("control_rdma_map_short", send_control(from, SOL_RDS_LEVEL, RDMA_MAP, NULL, 24));
    CHECK("control_atomic", send_control(from, SOL_RDS_LEVEL, ATOMIC_FADD, atomic, 72));
    CHECK("control_atomic_short", send_control(from, SOL_RDS_LEVEL, ATOMIC_FADD, atomic, 64));
    CHECK("control_status", send_control(from, SOL_RDS_LEVEL, RDMA_STATUS, NULL, 16));
    CHECK("control_update", send_control(from, SOL_RDS_LEVEL, CONG_UPDATE, NULL, 8));
    CHECK("control_unknown", send_control(from, SOL_RDS_LEVEL, 77, NULL, 8));
    CHECK("control_cookie", send_control(from, SOL_RDS_LEVEL, COOKIE, NULL, 4));
    CHECK("control_malformed", sendmsg(from, &message, 0));
    CHECK("control_of_sockets", send_control(from, SOL_SOCKET, 77, NULL, 8));
    CHECK("control_of_sockets_arrives", recv(to, big, 9, 0));
}

/* Receives a message with its control messages. */
static struct msghdr take(const char *name, int fd, void *control, size_t size)
{
    static struct iovec part = { big, sizeof big };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                              .msg_controllen = size };
    memset(control, 0, size);
    CHECK(name, recvmsg(fd, &message, 0));
    return message;
}

static void stamps(int from, int to)
{
    char control[256] __attribute__((aligned(8)));
    char traces[4] = { 2, 2, 0 };
    struct cmsghdr *head = (void *)control;
    struct msghdr message;
    set(to, SOL_SOCKET, SO_TIMESTAMP, 1);
    send(from, "hello", 5, 0);
    message = take("stamp", to, control, sizeof control);
    VALUE("stamp_control_size", message.msg_controllen);
    VALUE("stamp_level", head->cmsg_level);
    VALUE("stamp_type", head->cmsg_type);
    VALUE("stamp_size", head->cmsg_len);
    send(from, big, 100000, 0);
    message = take("stamp_long_message", to, control, sizeof control);
    VALUE("stamp_long_message_control_size", message.msg_controllen);
    send(from, "hello", 5, 0);
    message = take("stamp_no_room", to, control, 0);
    VALUE("stamp_no_room_flags", message.msg_flags);
    send(from, "hello", 5, 0);
    message = take("stamp_little_room", to, control, 24);
    VALUE("stamp_little_room_flags", message.msg_flags);
    VALUE("stamp_little_room_control_size", message.msg_controllen);
    VALUE("stamp_little_room_size", head->cmsg_len);
    set(to, SOL_SOCKET, SO_TIMESTAMP, 0);
    setsockopt(to, SOL_RDS_LEVEL, LATENCY, traces, 4);
    send(from, "hello", 5, 0);
    message = take("trace", to, control, sizeof control);
    VALUE("trace_control_size", message.msg_controllen);
    VALUE("trace_level", head->cmsg_level);
    VALUE("trace_type", head->cmsg_type);
    VALUE("trace_size", head->cmsg_len);
    VALUE("trace_count", CMSG_DATA(head)[0]);
    VALUE("trace_position", CMSG_DATA(head)[1]);
    traces[0] = 0;
    setsockopt(to, SOL_RDS_LEVEL, LATENCY, traces, 4);
    send(from, "hello", 5, 0);
    message = take("no_trace", to, control, sizeof control);
    VALUE("no_trace_control_size", message.msg_controllen);
}

static void pings(void)
{
    struct sockaddr_in source;
    socklen_t size = sizeof source;
    int fd = bound(own, 0);
    CHECK("ping", send4(fd, peer, 0, 0, 0));
    CHECK("pong", recvfrom(fd, big, 9, 0, (void *)&source, &size));
    VALUE("pong_port", ntohs(source.sin_port));
    CHECK("ping_payload", send4(fd, peer, 0, 3, 0));
    CHECK("pong_payload", recv(fd, big, 9, 0));
    CHECK("ping_self", send4(fd, own, 0, 0, 0));
    CHECK("pong_self", recv(fd, big, 9, 0));
    getsockname(fd, (void *)&source, &size);
    CHECK("send_self", send4(fd, own, ntohs(source.sin_port), 5, 0));
    CHECK("send_self_arrives", recv(fd, big, 9, 0));
    close(fd);
}

/* Sends until there is no more room; returns the bytes that were accepted. */
static long fill(int fd, size_t size)
{
    long total = 0;
    do {
        long sent = send4(fd, nobody, PORT, size, MSG_DONTWAIT);
        if (sent < 0 && errno != EAGAIN)
            return sent;
        total += sent < 0 ? 0 : sent;
        /* The library's node may have to read first. */
    } while (events(fd, POLLOUT, 1000) & POLLOUT);
    return total;
}

static void full(void)
{
    struct sockaddr_in to = at(nobody, PORT);
    const char *names[] = { "full_64", "full_8192", "full_65536" };
    size_t sizes[] = { 64, 8192, 65536 };
    int fd = -1;
    for (int at = 0; at < 3; at++) {
        close(fd);
        fd = bound(own, 0);
        set(fd, SOL_SOCKET, SO_SNDBUF, 100000);
        set(fd, SOL_RDS_LEVEL, MONITOR, 1);
        CHECK(names[at], fill(fd, sizes[at]));
    }
    VALUE("full_poll", events(fd, POLLIN | POLLOUT, 0));
    CHECK("full_send", send4(fd, nobody, PORT, 1, MSG_DONTWAIT));
    CHECK("full_cancel", setsockopt(fd, SOL_RDS_LEVEL, CANCEL, &to, sizeof to));
    VALUE("canceled_poll", events(fd, POLLOUT, SECONDS_MAX * 1000));
    CHECK("canceled_send", send4(fd, nobody, PORT, 1, MSG_DONTWAIT));
    close(fd);
}

/* Sends to a port, without blocking, until an error other than EAGAIN; counts accepted messages. */
static long congest(int fd, int *sent)
{
    for (int tries = 0; tries < SECONDS_MAX * 1000; tries++) {
        if (send4(fd, peer, SLOW_PORT, 1000, MSG_DONTWAIT) >= 0)
            ++*sent;
        else if (errno != EAGAIN)
            return -1;
        else
            poll(NULL, 0, 1);
    }
    return 0;
}

static void congestion(void)
{
    int fd = bound(own, 0), to = bound(peer, SLOW_PORT), sent = 0, number = 0, tries = 0;
    char control[256] __attribute__((aligned(8)));
    struct cmsghdr *head = (void *)control;
    struct msghdr message;
    uint64_t groups;
    set(to, SOL_SOCKET, SO_RCVBUF, 20000);
    set(fd, SOL_RDS_LEVEL, MONITOR, 1);
    CHECK("congested", congest(fd, &sent));
    while (number < sent && recv(to, big, 2000, 0) == 1000)
        number++;
    VALUE("congested_arrives", number == sent);
    VALUE("relieved_poll", events(fd, POLLIN, SECONDS_MAX * 1000));
    message = take("relieved", fd, control, sizeof control);
    VALUE("relieved_flags", message.msg_flags);
    VALUE("relieved_control_size", message.msg_controllen);
    VALUE("relieved_type", head->cmsg_type);
    memcpy(&groups, CMSG_DATA(head), sizeof groups);
    VALUE("relieved_is_group", groups == 1ull << SLOW_PORT % 64);
    while (send4(fd, peer, SLOW_PORT, 3, MSG_DONTWAIT) < 0 && tries++ < SECONDS_MAX * 1000)
        poll(NULL, 0, 1);
    CHECK("relieved_arrives", recv(to, big, 9, 0));
    close(fd);
    close(to);
}

int main(int count, char **words)
{
    int from, to;
    if (count < 3) {
        fprintf(stderr, "usage: api ADDRESS PEER [NAMESPACE]\n");
        return 2;
    }
    own = words[1], peer = words[2], namespace = words[3];
    alarm(600);
    sockets();
    unbound();
    connecting();
    binding();
    transport();
    socket_options();
    rds_options();
    requests();
    infos();
    from = bound(own, 0), to = bound(peer, PORT);
    sending(from, to);
    receiving(from, to);
    controls(from, to);
    stamps(from, to);
    pings();
    full();
    congestion();
    /* A second bind after a failed one, at another address of this namespace. */
    from = bound(own, PORT + 7), to = fresh();
    bind4(to, own, PORT + 7);
    CHECK("bind_elsewhere", bind4(to, namespace ? "127.0.0.1" : peer, 0));
    return 0;
}
