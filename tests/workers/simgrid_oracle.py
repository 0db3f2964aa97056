"""Run schedules in SimGrid: a script for a Python that has the ``simgrid`` module.

Instances come in on stdin, times go out on stdout, both JSON. An instance is a dict: ``ops`` (device, seconds, number
of inputs), ``n_devices``, ``n_links``, ``sends`` (per op, in order: consumers, target device or null for its own,
links, seconds, bytes) and, for real SimGrid links, ``pairs`` (from device, to device, bandwidth, latency).

Every op and every transfer is an actor. A device is a single-core host behind a mutex, which SimGrid serves first come,
first served. A transfer waits for the one before it on each of its links; then it keeps the first link's host busy for
its seconds or, with ``pairs``, is a SimGrid communication of its bytes. SimGrid decides when everything starts. All
instances run side by side, because a process can have only one SimGrid engine.
"""

import json
import sys

from simgrid import Actor, Comm, Engine, LinkInRoute, Mutex, NetZone, Semaphore, this_actor

SPEED = 1e9  # FLOP/s of each host, so that SimGrid's absolute tolerances stay far below one second of work
OPTIONS = (
    "surf/precision:1e-12",
    "maxmin/precision:1e-12",
    "network/model:CM02",  # latency + size / bandwidth, without its factors for TCP
    "network/TCP-gamma:0",
    "network/crosstraffic:0",
)


class Event:
    """Something that happens once and that many actors may wait for."""

    def __init__(self):
        self.happened = False
        self.waiting = []

    def wait(self):
        if not self.happened:
            semaphore = Semaphore(0)
            self.waiting.append(semaphore)
            semaphore.acquire()

    def fire(self):
        self.happened = True
        for semaphore in self.waiting:
            semaphore.release()


class Instance:
    def __init__(self, number, data, zone):
        self.ops, self.sends = data["ops"], data["sends"]
        self.is_real_network = "pairs" in data
        self.devices = [zone.create_host(f"{number}-device{d}", SPEED) for d in range(data["n_devices"])]
        self.wires = [zone.create_host(f"{number}-link{k}", SPEED) for k in range(data["n_links"])]
        for a, b, bandwidth, latency in data.get("pairs", ()):
            link = zone.create_link(f"{number}-{a}-{b}", bandwidth).set_latency(latency).seal()
            ends = self.devices[a].netpoint, self.devices[b].netpoint
            zone.add_route(*ends, None, None, [LinkInRoute(link)], False)
        self.idle = [Mutex() for _ in self.devices]
        self.inputs = [Semaphore(0) for _ in self.ops]
        self.last = [Event() for _ in self.wires]
        for event in self.last:
            event.happened = True
        self.start_s = [0.0] * len(self.ops)
        self.end_s = [0.0] * len(self.ops)
        for i, (device, _, _) in enumerate(self.ops):
            Actor.create(f"{number}-op{i}", self.devices[device], self.run_op, i)

    def run_op(self, i):
        device, seconds, n_inputs = self.ops[i]
        for _ in range(n_inputs):
            self.inputs[i].acquire()
        self.idle[device].lock()
        self.start_s[i] = Engine.clock
        this_actor.execute(seconds * SPEED)
        self.end_s[i] = Engine.clock
        self.idle[device].unlock()
        for consumers, target, links, seconds, size in self.sends[i]:
            if target is None:
                self.deliver(consumers)
                continue
            before, done = [self.last[link] for link in links], Event()
            for link in links:
                self.last[link] = done
            host = self.devices[device] if self.is_real_network else self.wires[links[0]]
            Actor.create("transfer", host, self.send, before, done, self.devices[target], seconds, size, consumers)

    def send(self, before, done, target, seconds, size, consumers):
        for event in before:
            event.wait()
        if self.is_real_network:
            Comm.sendto(this_actor.get_host(), target, size)
        else:
            this_actor.execute(seconds * SPEED)
        done.fire()
        self.deliver(consumers)

    def deliver(self, consumers):
        for c in consumers:
            self.inputs[c].release()


def main():
    engine = Engine(["oracle", *(f"--cfg={option}" for option in OPTIONS), "--log=root.thresh:error"])
    zone = NetZone.create_full_zone("root")
    instances = [Instance(k, data, zone) for k, data in enumerate(json.load(sys.stdin))]
    zone.seal()
    engine.run()
    print(json.dumps([[instance.start_s, instance.end_s] for instance in instances]))


main()
