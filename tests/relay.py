"""A switch between two network namespaces that delays and loses frames, as a kernel's netem does.

    ip netns exec SWITCH python tests/relay.py PORT PORT
    ip netns exec END python tests/relay.py DEVICE

The first command forwards frames. Each line of its standard input is "DELAY LOSS": the delay of a
frame in seconds, and the fraction of frames that are lost. It ends at the end of its input. The
second command makes a device at one of the two ends send frames with checksums, which the kernel
omits between virtual devices.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import random
import select
import socket
import struct
import sys
import time

_ALL, _OUTGOING, _LONGEST = 3, 4, 1 << 16  # Linux: ETH_P_ALL, PACKET_OUTGOING
_SIOCETHTOOL, _CHECKSUMS = 0x8946, 0x17  # and ETHTOOL_STXCSUM


def send_checksums(device: str) -> None:
    """Does what `ethtool -K DEVICE tx off` does, which also disables segmentation offload."""
    value = array.array("I", [_CHECKSUMS, 0])
    request = struct.pack("16sP", device.encode(), value.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


def forward(*ports: str) -> None:
    """Forward frames between two devices."""
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) for _ in ports]
    for end, port in zip(ends, ports, strict=True):
        end.bind((port, 0))
    other = dict(zip(ends, reversed(ends), strict=True))
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    rng, number, delay, loss = random.Random(0), 0, 0.0, 0.0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(waiting)
            end.send(frame)
        timeout = waiting[0][0] - now if waiting else None
        for ready in select.select([*ends, sys.stdin], [], [], timeout)[0]:
            if ready is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                delay, loss = map(float, line.split())
                print("done", flush=True)
                continue
            frame, sender = ready.recvfrom(_LONGEST)
            if sender[2] != _OUTGOING and rng.random() >= loss:
                number += 1  # frames with equal times keep their order
                heapq.heappush(waiting, (time.monotonic() + delay, number, other[ready], frame))


if __name__ == "__main__":
    (forward if len(sys.argv) > 2 else send_checksums)(*sys.argv[1:])
