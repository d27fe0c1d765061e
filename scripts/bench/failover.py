"""The first IO of a session that was idle while one of its two paths fell silent: a TCP proxy that
can stop forwarding without a word, and an NBD client. Used by scale.py."""

import selectors
import socket
import struct
import threading
import time

BLOCK = 4096
WAIT_MAX = 30


class Proxy:
    """Forwards connections to a port, until it is silent: then nothing gets through, and nothing is
    closed."""

    def __init__(self, target):
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.silent = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.over = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.over:
            if self.silent:
                time.sleep(0.05)
                continue
            for key, _ in self.selector.select(0.05):
                if self.silent or key.fileobj.fileno() < 0:
                    continue
                if key.data is None:
                    self.accept()
                else:
                    self.forward(key.fileobj, key.data)

    def accept(self):
        near, _ = self.listener.accept()
        far = socket.create_connection(self.target, WAIT_MAX)
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.selector.register(one, selectors.EVENT_READ, other)

    def forward(self, one, other):
        try:
            data = one.recv(1 << 18)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        for end in (one, other):
            if end.fileno() >= 0:
                self.selector.unregister(end)
                end.close()

    def stop(self):
        self.over = True
        self.thread.join(WAIT_MAX)
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()


class Nbd:
    """As much of an NBD client as reads blocks."""

    def __init__(self, path, export):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(WAIT_MAX)
        self.sock.connect(path)
        if self.take(18)[:16] != b"NBDMAGICIHAVEOPT":
            raise OSError("no NBD server")
        name = export.encode()
        data = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
        self.sock.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 7, len(data)))
        self.sock.sendall(data)
        while True:
            _, _, kind, length = struct.unpack(">QIII", self.take(20))
            self.take(length)
            if kind == 1:
                return
            if kind & (1 << 31):
                raise OSError(f"the NBD server refuses {export}: {kind:#x}")

    def take(self, length):
        data = b""
        while len(data) < length:
            more = self.sock.recv(length - len(data))
            if not more:
                raise OSError("the NBD server has closed the connection")
            data += more
        return data

    def read(self, offset):
        """Reads a block. Returns the time that took, in seconds."""
        start = time.monotonic()
        self.sock.sendall(struct.pack(">IHHQQI", 0x25609513, 0, 0, offset, offset, BLOCK))
        magic, error, cookie = struct.unpack(">IIQ", self.take(16))
        if (magic, error, cookie) != (0x67446698, 0, offset):
            raise OSError(f"a read failed: {magic:#x} {error} {cookie}")
        self.take(BLOCK)
        return time.monotonic() - start

    def close(self):
        self.sock.close()


def longest_reads(sock, export, proxy, rounds, idle, wait_back):
    """Rounds of idle time, silence of the path through the proxy, and reads: the longest of each.
    Then the path is let through again, and `wait_back` waits for it."""
    found = []
    for _ in range(rounds):
        nbd = Nbd(sock, export)
        for at in range(8):
            nbd.read(at * BLOCK)
        time.sleep(idle)
        proxy.silent = True
        # Enough that each path of each shard gets one.
        found.append(max(nbd.read(at * BLOCK) for at in range(8)))
        nbd.close()
        proxy.silent = False
        wait_back()
    return found
