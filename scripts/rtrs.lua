-- Wireshark and tshark dissector of RTRS and RNBD (docs/PROTOCOL.md), over RoCE v2 and over iWARP.
--
--   tshark -X lua_script:scripts/rtrs.lua -r FILE -Y rtrs
--   wireshark -X lua_script:scripts/rtrs.lua FILE
--
-- To always load it, copy it to the folder "Personal Lua Plugins" of Help > About > Folders. Tested
-- with tshark 4.0.
--
-- Wireshark decodes the transports, but has no hook for immediates: over RoCE they are a header of
-- the packet, and over iWARP it does not know them. So this is a postdissector. It finds packets by
-- fields of the transports and parses the rest itself. The heuristic dissectors at the end only
-- keep others away from payloads of known connections.
--
-- Filters, for example:
--   rtrs.imm.type == 0 && rnbd.op == 1        writes
--   rtrs.time > 0.1                           answers that took more than 100 ms
--   rtrs.imm.errno > 0                        answers with an error
--   rtrs.permit == 5 || rnbd.sector == 2048   one permit; one sector
--
-- What it cannot do:
--   - A connection must be captured from its start: which permit an immediate means depends on the
--     queue depth of CON_RSP. Packets of other connections are left alone.
--   - Keys and addresses are shown, and not checked against INFO_RSP.
--   - Requests in packets that the capture has cut short have no message, only an immediate.
--   - "Answer in" needs two passes: in Wireshark it is there, in tshark use -2.
--   - Retransmitted RoCE packets and lost TCP segments can spoil the matching of that permit.
--   - RoCE v2 over Ethernet only, no InfiniBand links, and no encrypted connections.

local rtrs = Proto("rtrs", "RTRS")
local rnbd = Proto("rnbd", "RNBD")

local IMM = {
    [0] = "IO_REQ", [1] = "IO_RSP", [2] = "IO_RSP_W_INV", [8] = "HB_MSG", [9] = "HB_ACK",
    [10] = "CHANGED",
}
local MSG = { [0] = "INFO_REQ", [1] = "INFO_RSP", [2] = "WRITE", [3] = "READ", [4] = "RKEY_RSP" }
local USER = {
    [0] = "SESS_INFO", [1] = "SESS_INFO_RSP", [2] = "OPEN", [3] = "OPEN_RSP", [4] = "IO",
    [5] = "CLOSE", [0x8001] = "FENCE", [0x8002] = "DISCOVER", [0x8003] = "CHALLENGE",
    [0x8004] = "AUTH",
}
local OP = {
    [0] = "read", [1] = "write", [2] = "flush", [3] = "discard", [4] = "secure erase",
    [5] = "write zeroes", [128] = "extents", [129] = "partial write",
}
local KIND = { [1] = "raw key", [2] = "certificates" }
local ACCESS = { [0] = "ro", [1] = "rw", [2] = "migration" }

local f = {
    cid = ProtoField.uint16("rtrs.cid", "Connection"),
    session_name = ProtoField.string("rtrs.session", "Session"),
    request_in = ProtoField.framenum("rtrs.request_in", "Request in", base.NONE,
        frametype.REQUEST),
    answer_in = ProtoField.framenum("rtrs.answer_in", "Answer in", base.NONE, frametype.RESPONSE),
    time = ProtoField.double("rtrs.time", "Seconds since the request"),
    cut = ProtoField.bool("rtrs.cut", "Message not captured"),

    magic = ProtoField.uint16("rtrs.con.magic", "Magic", base.HEX),
    version = ProtoField.uint16("rtrs.con.version", "Version", base.HEX),
    con_cid = ProtoField.uint16("rtrs.con.cid", "Connection"),
    cid_num = ProtoField.uint16("rtrs.con.cid_num", "Connections of the path"),
    recon_cnt = ProtoField.uint16("rtrs.con.recon_cnt", "Connects of the path"),
    path_uuid = ProtoField.bytes("rtrs.con.path_uuid", "Path (sess_uuid)"),
    session_uuid = ProtoField.bytes("rtrs.con.session_uuid", "Session (paths_uuid)"),
    may_create = ProtoField.bool("rtrs.con.may_create", "May create the session", 8, nil, 1),
    ext = ProtoField.string("rtrs.ext", "Extensions"),
    ext_client = ProtoField.uint8("rtrs.ext.client", "Client capabilities", base.HEX),
    ext_smaller = ProtoField.bool("rtrs.ext.smaller_depth", "Accepts a smaller queue depth", 8, nil,
        1),
    ext_client_changed = ProtoField.bool("rtrs.ext.client_changed", "CHANGED", 8, nil, 2),
    ext_client_times = ProtoField.bool("rtrs.ext.client_times", "Times in answers", 8, nil, 4),
    ext_client_auth = ProtoField.bool("rtrs.ext.client_authenticates", "Can authenticate", 8, nil,
        8),
    ext_client_info = ProtoField.bool("rtrs.ext.client_info_refusals", "Accepts INFO_RSP refusals",
        8, nil, 32),
    ext_depth = ProtoField.uint16("rtrs.ext.depth", "Queue depth of the session"),
    info_errno = ProtoField.uint32("rtrs.info.errno", "errno"),
    con_errno = ProtoField.int16("rtrs.con.errno", "errno"),
    queue_depth = ProtoField.uint16("rtrs.con.queue_depth", "Queue depth"),
    max_io_size = ProtoField.uint32("rtrs.con.max_io_size", "max_io_size"),
    max_hdr_size = ProtoField.uint32("rtrs.con.max_hdr_size", "max_hdr_size"),
    con_flags = ProtoField.uint32("rtrs.con.flags", "Flags", base.HEX),
    new_rkey = ProtoField.bool("rtrs.con.new_rkey", "NEW_RKEY", 32, nil, 2),
    ext_server = ProtoField.uint32("rtrs.ext.server", "Server's extensions", base.HEX),
    ext_lengths = ProtoField.bool("rtrs.ext.lengths", "Discards keep their length", 32, nil, 1),
    ext_fence = ProtoField.bool("rtrs.ext.fence", "FENCE", 32, nil, 2),
    ext_cache = ProtoField.bool("rtrs.ext.cache_id", "Cache ID", 32, nil, 4),
    ext_identity = ProtoField.bool("rtrs.ext.identity", "Identity", 32, nil, 8),
    ext_changed = ProtoField.bool("rtrs.ext.changed", "CHANGED", 32, nil, 16),
    ext_times = ProtoField.bool("rtrs.ext.times", "Times in answers", 32, nil, 32),
    ext_discover = ProtoField.bool("rtrs.ext.discover", "DISCOVER", 32, nil, 64),
    ext_auth = ProtoField.bool("rtrs.ext.authenticate", "Must authenticate", 32, nil, 128),
    ext_idle = ProtoField.bool("rtrs.ext.idle", "Fewer heartbeats on idle paths", 32, nil, 512),
    ext_process = ProtoField.bool("rtrs.ext.has_process", "Process", 32, nil, 1024),
    process = ProtoField.bytes("rtrs.ext.process", "Process of the server"),
    idle_ms = ProtoField.uint32("rtrs.ext.idle_ms", "Maximum time between heartbeats in ms"),
    server_id = ProtoField.bytes("rtrs.ext.server_id", "Server ID, or eviction secret"),

    imm = ProtoField.uint32("rtrs.imm", "Immediate", base.HEX),
    imm_type = ProtoField.uint8("rtrs.imm.type", "Type", base.DEC, IMM),
    permit = ProtoField.uint32("rtrs.permit", "Permit"),
    offset = ProtoField.uint32("rtrs.imm.offset", "Offset of the message"),
    next_ms = ProtoField.uint32("rtrs.imm.next_ms", "Milliseconds to the next heartbeat"),
    errno = ProtoField.uint16("rtrs.imm.errno", "errno"),
    inval = ProtoField.uint32("rtrs.inval_key", "Invalidated key", base.HEX),

    msg_type = ProtoField.uint16("rtrs.type", "Type", base.DEC, MSG),
    name = ProtoField.string("rtrs.info.name", "Session name"),
    count = ProtoField.uint16("rtrs.info.count", "Descriptors"),
    usr_len = ProtoField.uint16("rtrs.usr_len", "Length of the user header"),
    need_inval = ProtoField.bool("rtrs.read.need_inval", "Invalidate the key", 16, nil, 1),
    sg_count = ProtoField.uint16("rtrs.read.count", "Descriptors"),
    addr = ProtoField.uint64("rtrs.desc.addr", "Address", base.HEX),
    key = ProtoField.uint32("rtrs.desc.key", "Key", base.HEX),
    len = ProtoField.uint32("rtrs.desc.len", "Length"),
    rkey_permit = ProtoField.uint16("rtrs.rkey.permit", "Permit"),
    rkey = ProtoField.uint32("rtrs.rkey.key", "New key", base.HEX),
    server_us = ProtoField.uint32("rtrs.times.server_us", "Microseconds at the server"),
    disk_us = ProtoField.uint32("rtrs.times.disk_us", "Microseconds at the disk"),
    data_for = ProtoField.framenum("rtrs.data_for", "Data of the request in"),
}
rtrs.fields = f

local r = {
    type = ProtoField.uint16("rnbd.type", "Type", base.HEX, USER),
    version = ProtoField.uint8("rnbd.version", "Version"),
    access = ProtoField.uint8("rnbd.access", "Access", base.DEC, ACCESS),
    returns = ProtoField.bool("rnbd.returns", "Had the export open", 8, nil, 1),
    waits = ProtoField.bool("rnbd.waits", "No IO until rw", 8, nil, 2),
    name = ProtoField.string("rnbd.name", "Export"),
    device = ProtoField.uint32("rnbd.device", "Device"),
    sector = ProtoField.uint64("rnbd.sector", "Sector"),
    rw = ProtoField.uint32("rnbd.rw", "Operation and flags", base.HEX),
    op = ProtoField.uint32("rnbd.op", "Operation", base.DEC, OP, 0xff),
    sync = ProtoField.bool("rnbd.sync", "SYNC", 32, nil, 0x100),
    fua = ProtoField.bool("rnbd.fua", "FUA", 32, nil, 0x200),
    preflush = ProtoField.bool("rnbd.preflush", "PREFLUSH", 32, nil, 0x400),
    nounmap = ProtoField.bool("rnbd.nounmap", "NOUNMAP", 32, nil, 0x800),
    fast_only = ProtoField.bool("rnbd.fast_only", "FAST_ONLY", 32, nil, 0x80000000),
    bytes = ProtoField.uint32("rnbd.bytes", "Bytes"),
    prio = ProtoField.uint16("rnbd.prio", "Priority"),
    sectors = ProtoField.uint64("rnbd.open.sectors", "Size in sectors"),
    max_hw = ProtoField.uint32("rnbd.open.max_hw_sectors", "max_hw_sectors"),
    max_wz = ProtoField.uint32("rnbd.open.max_write_zeroes_sectors", "max_write_zeroes_sectors"),
    max_discard = ProtoField.uint32("rnbd.open.max_discard_sectors", "max_discard_sectors"),
    granularity = ProtoField.uint32("rnbd.open.discard_granularity", "discard_granularity"),
    alignment = ProtoField.uint32("rnbd.open.discard_alignment", "discard_alignment"),
    physical = ProtoField.uint16("rnbd.open.physical_block", "Physical block"),
    logical = ProtoField.uint16("rnbd.open.logical_block", "Logical block"),
    segments = ProtoField.uint16("rnbd.open.max_segments", "max_segments"),
    secure = ProtoField.uint16("rnbd.open.secure_discard", "secure_discard"),
    rotational = ProtoField.uint8("rnbd.open.rotational", "Rotational"),
    can_fua = ProtoField.bool("rnbd.open.fua", "FUA", 8, nil, 1),
    cache = ProtoField.bool("rnbd.open.cache", "Volatile cache", 8, nil, 2),
    is_volatile = ProtoField.bool("rnbd.open.volatile", "Volatile content", 8, nil, 1),
    fast_wz = ProtoField.bool("rnbd.open.fast_zeroes", "Fast write zeroes", 8, nil, 2),
    extents = ProtoField.bool("rnbd.open.extents", "Extents", 8, nil, 4),
    partial = ProtoField.bool("rnbd.open.partial_writes", "Partial writes", 8, nil, 8),
    cache_id = ProtoField.uint64("rnbd.open.cache_id", "Cache ID", base.HEX),
    fence_path = ProtoField.bytes("rnbd.fence.path", "Path to fence"),
    count = ProtoField.uint16("rnbd.discover.count", "Exports"),
    more = ProtoField.bool("rnbd.discover.more", "More exports follow", 32, nil, 1),
    block = ProtoField.uint32("rnbd.discover.block", "Logical block size"),
    read_only = ProtoField.bool("rnbd.discover.read_only", "Read-only", 8, nil, 1),
    open_rw = ProtoField.bool("rnbd.discover.open_rw", "Open for writing", 8, nil, 2),
    export_id = ProtoField.bytes("rnbd.discover.id", "Export ID"),
    auth_version = ProtoField.uint16("rnbd.auth.version", "Version"),
    nonce = ProtoField.bytes("rnbd.auth.nonce", "Nonce"),
    credential = ProtoField.bytes("rnbd.auth.credential", "Hash of the credential"),
    auth_kind = ProtoField.uint8("rnbd.auth.kind", "Kind", base.DEC, KIND),
    auth_count = ProtoField.uint8("rnbd.auth.count", "Keys or certificates"),
    auth_scheme = ProtoField.uint16("rnbd.auth.scheme", "SignatureScheme", base.HEX),
    fence_cnt = ProtoField.uint16("rnbd.fence.recon_cnt", "Its connects"),
    fence_process = ProtoField.bytes("rnbd.fence.process", "Its process of the server"),
}
rnbd.fields = r

local get = {
    ip_src = Field.new("ip.src"), ip_dst = Field.new("ip.dst"),
    ip6_src = Field.new("ipv6.src"), ip6_dst = Field.new("ipv6.dst"),
    udp_port = Field.new("udp.dstport"), udp_len = Field.new("udp.length"),
    stream = Field.new("tcp.stream"), src_port = Field.new("tcp.srcport"),
    payload = Field.new("tcp.payload"), ulpdu = Field.new("iwarp_mpa.ulpdulength"),
}

local ROCE_PORT = 4791
local MAGIC = 0x1bbd
-- Longest message after the data (OPEN and READ), with room for future ones.
local TAIL_MAX = 1024

-- Connections by the identifiers in their packets, requests in the connection manager by their
-- number, paths by their UUID, and what the first pass has found in each part of a frame.
local ends, requests, paths, known = {}, {}, {}, {}

function rtrs.init()
    ends, requests, paths, known = {}, {}, {}, {}
end

local function bits(number, at, count)
    return math.floor(number / 2 ^ at) % 2 ^ count
end

-- The part of a range from an offset on; none if it is shorter.
local function part(range, at, len)
    if range and len > 0 and at >= 0 and at + len <= range:len() then
        return range(at, len)
    end
end

-- The last bytes of a message, of which more may still come. If the capture has cut this part of
-- it short, they begin after it.
local function joined(before, range, is_cut)
    if is_cut then
        return ByteArray.new()
    end
    local tail = before and ByteArray.new(before:tohex()) or ByteArray.new()
    if range then
        tail:append(range:bytes())
    end
    local len = tail:len()
    return len > TAIL_MAX and tail:subset(len - TAIL_MAX, TAIL_MAX) or tail
end

-- Trees of messages. Each adds the fields that are present.

local function add_all(tree, range, fields)
    for _, field in ipairs(fields) do
        local there = part(range, field[2], field[3])
        if there then
            tree:add_le(field[1], there)
        end
    end
end

local function text_of(range, at, len)
    local there = part(range, at, len)
    return there and there:stringz() or ""
end

local function con_req(tree, range)
    add_all(tree, range, {
        { f.magic, 2, 2 }, { f.version, 4, 2 }, { f.con_cid, 6, 2 }, { f.cid_num, 8, 2 },
        { f.recon_cnt, 10, 2 }, { f.path_uuid, 12, 16 }, { f.session_uuid, 28, 16 },
        { f.may_create, 44, 1 },
    })
    if range(45, 4):string() == "RTRX" then
        tree:add(f.ext, range(45, 4))
        add_all(tree, range, {
            { f.ext_client, 49, 1 }, { f.ext_smaller, 49, 1 }, { f.ext_client_changed, 49, 1 },
            { f.ext_client_times, 49, 1 }, { f.ext_client_auth, 49, 1 }, { f.ext_client_info, 49, 1 },
            { f.ext_depth, 50, 2 },
        })
    end
end

local function con_rsp(tree, range)
    add_all(tree, range, {
        { f.magic, 0, 2 }, { f.version, 2, 2 }, { f.con_errno, 4, 2 }, { f.queue_depth, 6, 2 },
        { f.max_io_size, 8, 4 }, { f.max_hdr_size, 12, 4 }, { f.con_flags, 16, 4 },
        { f.new_rkey, 16, 4 },
    })
    if range(20, 4):string() == "RTRX" then
        tree:add(f.ext, range(20, 4))
        add_all(tree, range, {
            { f.ext_server, 24, 4 }, { f.ext_lengths, 24, 4 }, { f.ext_fence, 24, 4 },
            { f.ext_cache, 24, 4 }, { f.ext_identity, 24, 4 }, { f.ext_changed, 24, 4 },
            { f.ext_times, 24, 4 }, { f.ext_discover, 24, 4 }, { f.ext_auth, 24, 4 },
            { f.ext_idle, 24, 4 }, { f.server_id, 28, 16 }, { f.idle_ms, 44, 4 },
            { f.ext_process, 24, 4 }, { f.process, 48, 6 },
        })
    end
end

-- The exports of a page of DISCOVER_RSP.
local function discovered(tree, range)
    add_all(tree, range, { { r.count, 2, 2 }, { r.more, 4, 4 } })
    local at = 8
    for _ = 1, range:len() >= 8 and range(2, 2):le_uint() or 0 do
        local entry = part(range, at, 32)
        local name = entry and part(range, at + 32, entry(13, 1):uint())
        if not name then
            return
        end
        tree:add(r.name, name)
        add_all(tree, entry, {
            { r.sectors, 0, 8 }, { r.block, 8, 4 }, { r.read_only, 12, 1 }, { r.open_rw, 12, 1 },
            { r.export_id, 16, 16 },
        })
        at = at + 32 + name:len()
    end
end

-- An RNBD message, or the answer to one. Returns its title.
local function user_message(tree, range, is_answer)
    local kind = range(0, 2):le_uint()
    local sub = tree:add(rnbd, range)
    sub:add_le(r.type, range(0, 2))
    local title = USER[kind] or string.format("user message 0x%x", kind)
    if kind == 0 or kind == 1 then
        add_all(sub, range, { { r.version, 4, 1 } })
    elseif kind == 2 then
        add_all(sub, range, { { r.access, 4, 1 }, { r.returns, 5, 1 }, { r.waits, 5, 1 } })
        local name = text_of(range, 6, 255)
        sub:add(r.name, range(6), name)
        title = string.format("%s %q", title, name)
    elseif kind == 3 then
        add_all(sub, range, {
            { r.device, 4, 4 }, { r.sectors, 8, 8 }, { r.max_hw, 16, 4 }, { r.max_wz, 20, 4 },
            { r.max_discard, 24, 4 }, { r.granularity, 28, 4 }, { r.alignment, 32, 4 },
            { r.physical, 36, 2 }, { r.logical, 38, 2 }, { r.segments, 40, 2 },
            { r.secure, 42, 2 }, { r.rotational, 44, 1 }, { r.can_fua, 45, 1 },
            { r.cache, 45, 1 }, { r.is_volatile, 46, 1 }, { r.fast_wz, 46, 1 },
            { r.extents, 46, 1 }, { r.partial, 46, 1 }, { r.cache_id, 48, 8 },
        })
    elseif kind == 4 then
        add_all(sub, range, {
            { r.device, 4, 4 }, { r.sector, 8, 8 }, { r.rw, 16, 4 }, { r.op, 16, 4 },
            { r.sync, 16, 4 }, { r.fua, 16, 4 }, { r.preflush, 16, 4 }, { r.nounmap, 16, 4 },
            { r.fast_only, 16, 4 }, { r.bytes, 20, 4 }, { r.prio, 24, 2 },
        })
        local rw, len = part(range, 16, 4), part(range, 20, 4)
        if rw and len then
            local op = rw:le_uint() % 256
            title = OP[op] or "operation " .. op
            -- The sector of a flush means nothing.
            if op ~= 2 then
                title = string.format("%s sector %s, %d bytes", title,
                    tostring(range(8, 8):le_uint64()), len:le_uint())
            end
        end
    elseif kind == 5 then
        add_all(sub, range, { { r.device, 4, 4 } })
    elseif kind == 0x8002 and is_answer then
        title = "DISCOVER_RSP"
        discovered(sub, range)
    elseif kind == 0x8002 then
        sub:add(r.name, range(6), text_of(range, 6, 255))
    elseif kind == 0x8003 and is_answer then
        title = "CHALLENGE_RSP"
        add_all(sub, range, {
            { r.auth_version, 2, 2 }, { r.nonce, 8, 32 }, { r.auth_kind, 40, 1 },
            { r.auth_count, 41, 1 }, { r.auth_scheme, 42, 2 },
        })
    elseif kind == 0x8003 then
        add_all(sub, range, {
            { r.auth_version, 2, 2 }, { r.nonce, 8, 32 }, { r.credential, 40, 32 },
        })
    elseif kind == 0x8004 then
        add_all(sub, range, { { r.auth_version, 2, 2 } })
    elseif kind == 0x8001 then
        add_all(sub, range, { { r.fence_path, 4, 16 }, { r.fence_cnt, 20, 2 },
            { r.fence_process, 22, 6 } })
    end
    sub:append_text(", " .. title)
    return title
end

local function descriptor(tree, range)
    add_all(tree, range, { { f.addr, 0, 8 }, { f.key, 8, 4 }, { f.len, 12, 4 } })
end

-- The RTRS message at the end of what a client wrote into a chunk. `len` is the length of that
-- write. Returns its range, the user header's, and the descriptor of a READ.
local function find_message(tail, len, off)
    local have = tail:len()
    local function at_end(size, kind)
        local there = part(tail, have - size, size)
        if there and there(0, 2):le_uint() == kind then
            local usr_len = there(2, 2):le_uint()
            return there, part(tail, have - size - usr_len, usr_len)
        end
    end
    if len == off + 4 then
        return at_end(4, 2)
    end
    local read, user = at_end(24, 3)
    if read and read(6, 2):le_uint() == 1 then
        return read, user, read(8, 16)
    end
    read, user = at_end(8, 3)
    return read, user
end

local function request_message(tree, range, user)
    local kind = range(0, 2):le_uint()
    tree:add_le(f.msg_type, range(0, 2))
    tree:add_le(f.usr_len, range(2, 2))
    if kind == 3 then
        add_all(tree, range, { { f.need_inval, 4, 2 }, { f.sg_count, 6, 2 } })
        if range:len() >= 24 then
            descriptor(tree, range(8, 16))
        end
    end
    return user and user:len() >= 4 and user_message(tree, user) or MSG[kind]
end

-- A message in a send. Returns its title.
local function sent_message(conn, tree, range, first_pass)
    local kind = range:len() >= 2 and range(0, 2):le_uint()
    if kind == 0 and range:len() >= 257 then
        tree:add_le(f.msg_type, range(0, 2))
        local name = text_of(range, 2, 255)
        tree:add(f.name, range(2, 255), name)
        if first_pass then
            conn.path.name = name
        end
        return string.format("INFO_REQ %q", name)
    elseif kind == 1 and range:len() >= 8 then
        tree:add_le(f.msg_type, range(0, 2))
        tree:add_le(f.count, range(2, 2))
        if range(2, 2):le_uint() == 0 then
            tree:add_le(f.info_errno, range(4, 4))
            return string.format("INFO_RSP, refused with errno %d", range(4, 4):le_uint())
        end
        for at = 8, range:len() - 16, 16 do
            descriptor(tree, range(at, 16))
        end
        return string.format("INFO_RSP, %d descriptors", range(2, 2):le_uint())
    elseif kind == 4 and range:len() >= 8 then
        tree:add_le(f.msg_type, range(0, 2))
        add_all(tree, range, {
            { f.rkey_permit, 2, 2 }, { f.rkey, 4, 4 }, { f.server_us, 8, 4 }, { f.disk_us, 12, 4 },
        })
        return "RKEY_RSP"
    end
end

-- Events on a connection.

-- A write that may arrive in parts. `remote` is address and key, in the first part over RoCE and in
-- each part over iWARP.
local function note_write(side, is_first, remote, range, len, kept)
    if is_first or not side.write then
        side.write = { remote = remote, len = 0 }
    end
    local write = side.write
    write.len = write.len + len
    write.tail = joined(write.tail, range, kept < len)
    return write
end

-- The request whose READ gave this address and key.
local function request_of_data(path, remote)
    for _, request in pairs(path.running) do
        local desc = request.desc
        if desc and desc.addr == remote.addr and desc.key == remote.key then
            return request
        end
    end
end

local function desc_of(range)
    return { addr = range(0, 8):le_uint64():tohex(), key = range(8, 4):le_uint() }
end

-- An immediate in the first pass: which request or answer it is.
local function note_immediate(conn, side, imm, frame, time)
    local found = {}
    local kind = bits(imm, 28, 4)
    if kind == 0 and side.is_client then
        local write = side.write
        side.write = nil
        found.permit = bits(imm, conn.mem_bits, 28 - conn.mem_bits)
        found.offset = bits(imm, 0, conn.mem_bits)
        found.request = { frame = frame, time = time }
        if write and write.tail:len() > 0 then
            found.tail, found.len = write.tail, write.len
            local range = write.tail:tvb("RTRS request")()
            local message, user, desc = find_message(range, write.len, found.offset)
            if message and user and user:len() >= 2 then
                found.request.user = user(0, 2):le_uint()
            end
            found.request.desc = desc and desc_of(desc)
        end
        conn.path.running[found.permit] = found.request
    elseif (kind == 1 or kind == 2) and not side.is_client then
        found.permit = bits(imm, 0, 19)
        found.errno = bits(imm, 19, 9)
        found.answered = conn.path.running[found.permit]
        if found.answered then
            found.answered.answer = frame
            conn.path.running[found.permit] = nil
        end
    end
    return found
end

local function show_immediate(tree, found, range, imm)
    local kind = bits(imm, 28, 4)
    local title = IMM[kind] or string.format("immediate of type %d", kind)
    tree:add(f.imm, range, imm)
    tree:add(f.imm_type, range, kind)
    if found.permit then
        tree:add(f.permit, range, found.permit)
        title = string.format("%s permit %d", title, found.permit)
    end
    if found.offset then
        tree:add(f.offset, range, found.offset)
    end
    if kind == 10 then
        tree:add(r.device, range, bits(imm, 0, 28))
    end
    if kind == 8 and bits(imm, 0, 28) > 0 then
        tree:add(f.next_ms, range, bits(imm, 0, 28))
    end
    if found.errno then
        tree:add(f.errno, range, found.errno)
        title = title .. (found.errno > 0 and string.format(" errno %d", found.errno) or "")
    end
    if found.request then
        if found.request.answer then
            tree:add(f.answer_in, found.request.answer):set_generated()
        end
        local whole = found.tail and found.tail:tvb("RTRS request")()
        local message, user
        if whole then
            message, user = find_message(whole, found.len, found.offset)
        end
        if message then
            title = title .. ": " .. request_message(tree, message, user)
        else
            tree:add(f.cut, true):set_generated()
        end
    end
    return title
end

local function tree_of(conn, tree, range)
    local sub = tree:add(rtrs, range)
    sub:add(f.cid, conn.cid):set_generated()
    if conn.path.name then
        sub:add(f.session_name, conn.path.name):set_generated()
    end
    return sub
end

-- Adds an answer's request and time.
local function show_match(tree, found, time)
    if found.answered then
        tree:add(f.request_in, found.answered.frame):set_generated()
        tree:add(f.time, time - found.answered.time):set_generated()
    end
end

local function new_connection(range)
    local uuid = range(12, 16):bytes():tohex()
    -- A path that reconnects has no earlier requests.
    local cid, count = range(6, 2):le_uint(), range(10, 2):le_uint()
    local path = paths[uuid]
    if not path or path.count ~= count then
        path = { running = {}, count = count, name = path and path.name }
        paths[uuid] = path
    end
    return {
        cid = cid,
        path = path,
        mem_bits = 19,
        client = { is_client = true },
        server = { is_client = false },
    }
end

local function accept(conn, range)
    local depth = range(6, 2):le_uint()
    local depth_bits = 0
    while 2 ^ depth_bits < depth do
        depth_bits = depth_bits + 1
    end
    conn.mem_bits = 28 - depth_bits
end

local function is_con_req(range)
    return range and range:len() >= 56 and range(2, 2):le_uint() == MAGIC
end

local function is_con_rsp(range)
    return range and range:len() >= 56 and range(0, 2):le_uint() == MAGIC
end

local function con_title(name, range, at)
    local errno = at and range(at, 2):le_int() or 0
    return name .. (errno ~= 0 and string.format(" errno %d", errno) or "")
end

-- Calls `first` in the first pass only, and returns what it returned.
local function once(pinfo, number, first)
    local frame = known[pinfo.number]
    if not frame then
        frame = {}
        known[pinfo.number] = frame
    end
    if not pinfo.visited or frame[number] == nil then
        frame[number] = first() or false
    end
    return frame[number]
end

-- SESS_INFO, OPEN and DISCOVER, whose data is a message.
local HAS_ANSWER = { [0] = true, [2] = true, [0x8002] = true, [0x8003] = true }

-- RoCE v2.

local SEND_FIRST = { [0] = true, [4] = true, [5] = true, [0x17] = true }
local WRITE_FIRST = { [6] = true, [10] = true, [11] = true }
local HAS_IMM = { [3] = true, [5] = true, [9] = true, [11] = true }
local HAS_IETH = { [0x16] = true, [0x17] = true }
local IS_MIDDLE = { [0] = true, [1] = true, [6] = true, [7] = true }

local function roce_cm(tvb, at, pinfo, tree, addresses)
    local mad = part(tvb(), at, 24)
    local data = part(tvb(), at + 24, 232)
    if not mad or not data or mad(1, 1):uint() ~= 7 then
        return
    end
    local kind = mad(16, 2):uint()
    local private = { [0x10] = { 140 + 36, 56 }, [0x13] = { 36, 56 }, [0x12] = { 84, 56 } }
    local place = private[kind]
    local range = place and data(place[1], place[2])
    if kind == 0x10 and is_con_req(range) then
        local conn = once(pinfo, 0, function()
            local conn = new_connection(range)
            requests[addresses.src .. data(0, 4):bytes():tohex()] = conn
            ends[addresses.src .. "/" .. bits(data(32, 4):uint(), 8, 24)] =
                { conn = conn, side = conn.server }
            return conn
        end)
        con_req(tree_of(conn, tree, range), range)
        return "CON_REQ"
    elseif (kind == 0x13 or kind == 0x12) and is_con_rsp(range) then
        local conn = once(pinfo, 0, function()
            local conn = requests[addresses.dst .. data(4, 4):bytes():tohex()]
            if conn and kind == 0x13 then
                accept(conn, range)
                ends[addresses.src .. "/" .. bits(data(12, 4):uint(), 8, 24)] =
                    { conn = conn, side = conn.client }
            end
            return conn
        end)
        if conn then
            con_rsp(tree_of(conn, tree, range), range)
            return con_title("CON_RSP", range, 4)
        end
    end
end

local function roce(tvb, pinfo, tree, addresses)
    local udp = get.udp_port()
    if not udp or udp.value ~= ROCE_PORT then
        return
    end
    local bth = udp.range:offset() + 6
    local head = part(tvb(), bth, 12)
    if not head then
        return
    end
    local opcode = head(0, 1):uint()
    if opcode == 0x64 then
        return roce_cm(tvb, bth + 12 + 8, pinfo, tree, addresses)
    end
    local to = ends[addresses.dst .. "/" .. bits(head(4, 4):uint(), 0, 24)]
    if opcode > 0x17 or not to then
        return
    end
    local at, remote, imm, inval = bth + 12, nil, nil, nil
    if WRITE_FIRST[opcode] then
        local reth = part(tvb(), at, 16)
        if not reth then
            return
        end
        remote = { addr = reth(0, 8):uint64():tohex(), key = reth(8, 4):uint() }
        at = at + 16
    end
    if HAS_IMM[opcode] or HAS_IETH[opcode] then
        local word = part(tvb(), at, 4)
        if not word then
            return
        end
        if HAS_IMM[opcode] then
            imm = word
        else
            inval = word
        end
        at = at + 4
    end
    -- After the payload: padding and the checksum.
    local whole = get.udp_len().value - 8 - (at - bth) - 4 - bits(head(1, 1):uint(), 4, 2)
    local kept = math.max(0, math.min(whole, tvb:len() - at))
    local range = part(tvb(), at, kept)
    local is_write = opcode >= 6 and opcode <= 11
    local conn, side = to.conn, to.side
    local time = pinfo.abs_ts
    local found = once(pinfo, 0, function()
        local found = {}
        if is_write then
            local write =
                note_write(side, WRITE_FIRST[opcode], remote, range, math.max(whole, 0), kept)
            found.data = not side.is_client and remote and request_of_data(conn.path, remote)
            found.is_part = not imm and side.is_client and whole > 0
            if not IS_MIDDLE[opcode] and not imm then
                side.write = nil
            elseif imm and not side.is_client then
                side.write = nil
            end
            found.write = write
        end
        if imm then
            local kind = note_immediate(conn, side, imm:uint(), pinfo.number, time)
            for name, value in pairs(found) do
                kind[name] = value
            end
            found = kind
        end
        return found
    end)
    local sub = tree_of(conn, tree, head)
    local titles = {}
    if inval then
        sub:add(f.inval, inval)
        titles[#titles + 1] = "send with invalidate"
    end
    if not is_write and range then
        titles[#titles + 1] = sent_message(conn, sub, range, not pinfo.visited)
    end
    if found.data then
        sub:add(f.data_for, found.data.frame):set_generated()
        titles[#titles + 1] = HAS_ANSWER[found.data.user] and range and range:len() >= 4
            and user_message(sub, range, true) or "data of a read"
    elseif found.is_part then
        titles[#titles + 1] = "part of a request"
    end
    if imm then
        titles[#titles + 1] = show_immediate(sub, found, imm, imm:uint())
        show_match(sub, found, time)
    end
    return table.concat(titles, ", ")
end

-- iWARP.

local MPA_KEYS = { ["MPA ID Req Frame"] = "request", ["MPA ID Rep Frame"] = "reply" }

local function mpa_start(range, pinfo, tree, stream, from)
    local which = range:len() >= 20 and MPA_KEYS[range(0, 16):string()]
    if not which then
        return
    end
    -- Enhanced words, and our preamble.
    local at = 20 + (bits(range(16, 1):uint(), 4, 1) == 1 and 4 or 0)
    local preamble = part(range, at, 8)
    local has_preamble = preamble and preamble(0, 4):string() == "RTIW"
    local private = part(range, at + (has_preamble and 8 or 0), 56)
    if which == "request" and is_con_req(private) then
        local conn = once(pinfo, 0, function()
            local conn = new_connection(private)
            conn.has_prefix = has_preamble
            conn.initiator = from
            ends["tcp/" .. stream] = conn
            return conn
        end)
        con_req(tree_of(conn, tree, private), private)
        return "CON_REQ"
    elseif which == "reply" and is_con_rsp(private) and ends["tcp/" .. stream] then
        local conn = ends["tcp/" .. stream]
        if not pinfo.visited then
            accept(conn, private)
            conn.has_prefix = conn.has_prefix and has_preamble
        end
        con_rsp(tree_of(conn, tree, private), private)
        return con_title("CON_RSP", private, 4)
    end
end

local WRITE, SEND, SEND_INV, IMMEDIATE = 0, 3, 4, 8

local function iwarp_frame(conn, side, number, ulpdu, pinfo, tree)
    local is_last = bits(ulpdu(0, 1):uint(), 6, 1) == 1
    local opcode = bits(ulpdu(1, 1):uint(), 0, 4)
    local is_tagged = bits(ulpdu(0, 1):uint(), 7, 1) == 1
    local head = is_tagged and 14 or 18
    if ulpdu:len() < head then
        return
    end
    local len = ulpdu:len() - head
    local range = part(ulpdu, head, len)
    local time = pinfo.abs_ts
    if opcode == WRITE and is_tagged then
        local found = once(pinfo, number, function()
            if len == 0 then
                return {}
            end
            local remote = { addr = ulpdu(6, 8):uint64():tohex(), key = ulpdu(2, 4):uint() }
            local is_first = not side.write or side.write.is_over
            local write = note_write(side, is_first, remote, range, len, len)
            write.is_over = is_last
            local data = not side.is_client and request_of_data(conn.path, remote)
            return { data = data }
        end)
        if len == 0 then
            return
        end
        local sub = tree_of(conn, tree, ulpdu)
        if found.data then
            sub:add(f.data_for, found.data.frame):set_generated()
            return HAS_ANSWER[found.data.user] and len >= 4 and user_message(sub, range, true)
                or "data of a read"
        end
        return side.is_client and not is_last and "part of a request" or nil
    end
    local imm, inval
    if opcode == IMMEDIATE and len >= 8 then
        imm = range(0, 4)
        range = nil
    elseif opcode == SEND or opcode == SEND_INV then
        inval = opcode == SEND_INV and ulpdu(2, 4)
        -- The prefix is in the first frame of the message.
        if conn.has_prefix and len >= 8 and ulpdu(14, 4):uint() == 0 then
            imm = bits(range(0, 1):uint(), 0, 1) == 1 and range(4, 4) or nil
            range = part(range, 8, len - 8)
        end
    else
        return
    end
    local found = imm and once(pinfo, number, function()
        return note_immediate(conn, side, imm:uint(), pinfo.number, time)
    end)
    local sub = tree_of(conn, tree, ulpdu)
    local titles = {}
    if inval then
        sub:add(f.inval, inval)
        titles[#titles + 1] = "send with invalidate"
    end
    if range then
        titles[#titles + 1] = sent_message(conn, sub, range, not pinfo.visited)
    end
    if found then
        titles[#titles + 1] = show_immediate(sub, found, imm, imm:uint())
        show_match(sub, found, time)
    end
    return table.concat(titles, ", ")
end

local function iwarp(pinfo, tree, addresses)
    local stream, port = get.stream(), get.src_port()
    if not stream or not port then
        return
    end
    local from = addresses.src .. "/" .. port.value
    local payload = get.payload()
    local start = payload and mpa_start(payload.range, pinfo, tree, stream.value, from)
    if start then
        return start
    end
    local conn = ends["tcp/" .. stream.value]
    if not conn then
        return
    end
    local side = from == conn.initiator and conn.client or conn.server
    local titles = {}
    for number, length in ipairs({ get.ulpdu() }) do
        local range = length.range
        local all = length.source and length.source() or range
        local ulpdu = part(all, range:offset() + 2, length.value)
        if ulpdu and ulpdu:len() >= 2 then
            local title = iwarp_frame(conn, side, number, ulpdu, pinfo, tree)
            if title and title ~= "" then
                titles[#titles + 1] = title
            end
        end
    end
    return table.concat(titles, "; ")
end

function rtrs.dissector(tvb, pinfo, tree)
    local src, dst = get.ip_src() or get.ip6_src(), get.ip_dst() or get.ip6_dst()
    if not src or not dst then
        return
    end
    local addresses = { src = tostring(src), dst = tostring(dst) }
    local title = roce(tvb, pinfo, tree, addresses) or iwarp(pinfo, tree, addresses)
    if title and title ~= "" then
        pinfo.cols.protocol = "RTRS"
        pinfo.cols.info = title
    end
end

register_postdissector(rtrs)

-- No other dissector may take payloads of known connections: RPC over RDMA takes an empty send for
-- a broken message of its own.
local function claim_roce(_, _, _)
    local port, dst = get.udp_port(), get.ip_dst() or get.ip6_dst()
    if not port or not dst or not port.source then
        return false
    end
    local qp = part(port.source(), port.range:offset() + 11, 3)
    return qp ~= nil and ends[tostring(dst) .. "/" .. qp:uint()] ~= nil
end
rtrs:register_heuristic("infiniband.payload", claim_roce)

local function claim_iwarp(_, _, _)
    local stream = get.stream()
    return stream ~= nil and ends["tcp/" .. stream.value] ~= nil
end
rtrs:register_heuristic("iwarp_ddp_rdmap", claim_iwarp)
