#!/usr/bin/env python3
"""Extracts the six novels of Debian's r-cran-janeaustenr as plain text, without R.

usage: extract_austen.py PACKAGE_ROOT DESTINATION
PACKAGE_ROOT is a folder into which the .deb was unpacked (dpkg -x). `data/Rdata.rdb` holds six records
[u32 big-endian length of the expanded bytes, zlib stream] of an R serialization (XDR) of a character vector,
one line of text an element. Lines are joined with a newline, without a final one; every file is checked
against its SHA-256 and written under a temporary name first.
"""
import hashlib
import os
import struct
import sys
import zlib

# SHA-256 of the text, by novel.
NOVELS = {
    "emma": "dd08b340a56ad4a0a00718d5682528a5a5886ae0aef91c9e0fa528074fa64b75",
    "mansfield_park": "e0e9ef3863ea77f51f6070062ee0dd50ad9b933223880617629e4e4963ea40ff",
    "northanger_abbey": "8618a5acf5be50cc6e9b7680c7469fb6012649ab08c709dfc63c6367989fd31d",
    "persuasion": "726513a6c18bb678427bcbcf7c72d0d20816a67c25b0471b26ddcabf3ebac140",
    "pride_and_prejudice": "2e44edaa4946d64ad541c68e0224f5d672f43bf3ce2a8a0b0637ad5e02fc6eb3",
    "sense_and_sensibility": "0996d90842bbe8093f3b8142c1e77d1b20cff52d1d0615f3ed67733653e74e26",
}

CHARSXP, STRSXP = 9, 16
LATIN1 = 4  # encoding bit of a CHARSXP's general-purpose flags


def records(blob):
    """Yields the expanded bytes of every record; the index file is not needed."""
    at = 0
    while at < len(blob):
        if at + 4 > len(blob):
            sys.exit(f"Rdata.rdb: truncated record header at byte {at}")
        (length,) = struct.unpack(">I", blob[at:at + 4])
        stream = zlib.decompressobj()
        expanded = stream.decompress(blob[at + 4:])
        if not stream.eof or len(expanded) != length:
            sys.exit(f"Rdata.rdb: record at byte {at}: expected {length} bytes, got {len(expanded)}")
        at = len(blob) - len(stream.unused_data)
        yield expanded


def lines_of(expanded):
    """Strings of one serialized character vector (XDR, format version 2 or 3)."""
    if expanded[:2] != b"X\n":
        sys.exit("Rdata.rdb: not an XDR serialization")
    (version,) = struct.unpack(">i", expanded[2:6])
    at = 14
    if version == 3:
        (encoding_length,) = struct.unpack(">i", expanded[14:18])
        at = 18 + encoding_length
    flags, count = struct.unpack(">ii", expanded[at:at + 8])
    if flags & 0xff != STRSXP:
        sys.exit(f"Rdata.rdb: expected a character vector, got R type {flags & 0xff}")
    at += 8
    result = []
    for _ in range(count):
        flags, length = struct.unpack(">ii", expanded[at:at + 8])
        if flags & 0xff != CHARSXP or length < 0 or at + 8 + length > len(expanded):
            sys.exit("Rdata.rdb: malformed string")
        line = expanded[at + 8:at + 8 + length]
        if flags >> 12 & LATIN1:
            line = line.decode("latin-1").encode("utf-8")
        result.append(line)
        at += 8 + length
    return result


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.split("\n")[2])
    root, destination = sys.argv[1:]
    path = os.path.join(root, "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    with open(path, "rb") as file:
        blob = file.read()
    by_hash = {digest: name for name, digest in NOVELS.items()}
    found = {}
    for expanded in records(blob):
        text = b"\n".join(lines_of(expanded))
        name = by_hash.get(hashlib.sha256(text).hexdigest())
        if name is not None:
            found[name] = text
    missing = sorted(set(NOVELS) - set(found))
    if missing:
        sys.exit(f"{path}: no text with the expected SHA-256 for: {', '.join(missing)}")
    os.makedirs(destination, exist_ok=True)
    for name, text in found.items():
        target = os.path.join(destination, name + ".txt")
        with open(target + ".part", "wb") as file:
            file.write(text)
        os.replace(target + ".part", target)


if __name__ == "__main__":
    main()
