"""tls:// compared to tcp:// with CRC32C, on an export in memory: IO, and the longest IO when the
server is killed and restarted. Then fio over TLS to nbdkit, and over rtrs-client and tls://."""

import os
import signal
import time

from processes import Process, command, free_port, parse_json
from servers import Fio, Ours, Session, Side
from tables import BANDWIDTH, DEFAULTS, Comparison, Figure, Row, judge, measure, selected

SIZE = 256 << 20


class Server(Ours):
    """rtrs-server with one shard that listens on TCP and on TLS."""

    name = "tls-server"
    attach = False

    def __init__(self, args):
        super().__init__(args, f"mem:{SIZE},id=bench")
        self.tls_port = free_port()
        key, client_key, clients = (self.scratch(name) for name in ("key", "client.key", "clients"))
        server_key = command(f"{args.bin_dir}/rtrs-server", "key", "generate", key).strip()
        with open(clients, "w") as out:
            out.write("bench " + command(f"{args.bin_dir}/rtrs-client", "key", "generate",
                                         client_key))
        self.server_flags = ("--shards", "1", "--listen", f"tls://127.0.0.1:{self.tls_port}",
                             "--key-file", key, "--clients-file", clients, "--access", "anyone:rw",
                             "--log", "error")
        self.keys = ("--key-file", client_key, "--server-key", server_key)


class OverScheme(Side):
    """A session over one of the schemes, with the server that all schemes share."""

    def __init__(self, args, server, scheme):
        super().__init__(args)
        self.name, self.server = scheme, server
        port, keys = (server.port, ()) if scheme == "tcp" else (server.tls_port, server.keys)
        self.path_flags = [f"--path={scheme}://127.0.0.1:{port}"]
        self.bench_flags = (*keys, "--access", "ro", "--log", "error")

    def pids(self):
        return self.server.pids()


class Bridge(OverScheme, Ours):
    """rtrs-client between fio and the session."""

    def start(self):
        self.start_client(*self.path_flags, *self.bench_flags)

    def pids(self):
        return self.server.pids() + Ours.pids(self)


class NbdkitTls(Side):
    """nbdkit with TLS. fio has no certificate, so nbdkit asks for none; this changes only the
    handshake."""

    name = "nbdkit"

    def start(self):
        directory = self.scratch("pki")
        os.mkdir(directory)
        self.uri = f"nbds://127.0.0.1:{self.port}/"

        command("openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "1", "-subj",
                "/CN=bench", "-keyout", "server-key.pem", "-out", "server-cert.pem", cwd=directory)
        # The certificate is self-signed, so it is also the CA's.
        os.link(f"{directory}/server-cert.pem", f"{directory}/ca-cert.pem")
        self.launch("nbdkit", "-f", "-i", "127.0.0.1", "-p", self.port, "--tls", "require",
                    "--tls-certificates", directory, "memory", SIZE, address=self.port)


def restart(side, args):
    """Kills and restarts the server under a load."""
    load = Process("bench", Session("randread", "4k", 8).argv(side, 4))
    time.sleep(1.5)
    side.server.processes[0].send(signal.SIGKILL)
    side.server.stop()
    side.server.start()
    return {"longest_us": float(parse_json("bench", load.wait(60))["lat_us"]["max"])}


SCHEMES, BRIDGES = ("tcp", "tls"), ("nbdkit", "bridge")
TABLES = {"tls:// / tcp:// with CRC": [
    Row("randread", "4k randread QD32", Session("randread", "4k", 32), SCHEMES, asked=0.8),
    Row("read", "128k read QD16", Session("read", "128k", 16), SCHEMES, BANDWIDTH, 0.65),
    Row("restart", "longest IO, server killed and restarted", restart, SCHEMES,
        Figure("longest_us", "{longest_us:.0f} us", True), 1.2),
    Row("bridge4k", "fio 4k randread QD32: nbdkit with TLS, bridge over tls://",
        Fio("randread", "4k", 32), BRIDGES, asked=1.3),
    Row("bridge128k", "fio 128k read QD16: the same", Fio("read", "128k", 16), BRIDGES, BANDWIDTH,
        1.0),
]}


def run(args):
    args.size = SIZE
    rows = selected(args, TABLES)
    server = Server(args)
    server.start()
    sides = {scheme: OverScheme(args, server, scheme) for scheme in SCHEMES}
    samples = measure(args, [row for row in rows if row.sides == SCHEMES], sides)
    # Measured last: otherwise the export would be open, and the session would see the restarts.
    bridges = {"nbdkit": NbdkitTls(args), "bridge": Bridge(args, server, "tls")}
    samples |= measure(args, [row for row in rows if row.sides == BRIDGES], bridges)
    server.stop()
    return {"tables": {"": judge(rows, samples, sides | bridges)}}


COMPARISON = Comparison(
    "tls:// with tcp://, and with TLS to nbdkit", TABLES, run,
    defaults=DEFAULTS | {"runtime": 3},
    tools={"openssl": "openssl", "fio": "fio", "nbdkit": "nbdkit"})
