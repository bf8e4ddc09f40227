"""Webhooks: which addresses are allowed, signatures, repetitions, order and restarts."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import openai
import pytest

from benchmarks.webhook_receiver import Receiver
from tests.refusals import check_refusals
from tests.serve.jobs import Jobs, running, wait_until
from wan.serve.events import webhooks
from wan.serve.events.webhooks import Webhooks
from wan.serve.jobs.job import ServiceJob
from wan.serve.queue import deliveries
from wan.serve.queue.service import Limits
from wan.serve.requests.webhook_hosts import WebhookHosts, read_url, read_webhook_host
from wan.settings.errors import InputError

SECRET = "whsec_" + "c2VjcmV0IG9mIHRoZSB0ZXN0cw=="


def hosts(*names: str) -> WebhookHosts:
    values = [read_webhook_host("--webhook_hosts", name) for name in names]
    return WebhookHosts(
        frozenset(value for value in values if isinstance(value, str)),
        tuple(value for value in values if not isinstance(value, str)),
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "_LONGEST_PAUSE", 0.05)


LOCAL = hosts("localhost", "127.0.0.0/8", "::1")


def make_jobs(folder: Path, allowed: WebhookHosts = LOCAL) -> Jobs:
    return Jobs(folder, Limits(queue=1000, webhook_hosts=allowed))


@asynccontextmanager
async def delivering(jobs: Jobs, allowed: WebhookHosts = LOCAL) -> Any:
    """Delivers in the background; yields the list of the attempts' results."""
    attempts: list[str] = []
    key = webhooks.read_signing_key(SECRET)
    Webhooks(jobs.service, key, allowed, attempts.append)
    async with running(jobs.service.deliveries.run()):
        yield attempts


async def wait_until_delivered(jobs: Jobs) -> None:
    await wait_until(lambda: not jobs.service.journal.count_deliveries("webhook"))


def test_fields() -> None:
    """Refused addresses; none of them is repeated, as it may have a secret."""
    texts = ["", "x", "ftp://a.b/", "http://", "http://a b/", "http://ü.example/", "http:///x"]
    texts += ["http://user:secret@a.example/", "http://a.example:99999/", "http://a.example:0/"]
    texts += ["http://a.example/\r\nx: y", "//a.example/", "http://[::1", "https://a\\b/", 5, []]
    texts += ["http://a.example/" + "x" * 2000, "http://a.example:secret/", "http://a$b.example/"]
    sentences = {}
    for text in texts:
        with pytest.raises(InputError) as refused:
            read_url(text)
        assert "secret" not in str(refused.value)
        sentences[str(text)[:40].encode("unicode_escape").decode()] = str(refused.value)
    check_refusals("serve: webhook_url", sentences)
    assert read_url("HTTPS://Hooks.example/a?b#c") == "https://Hooks.example/a?b"


PUBLIC = "93.184.215.14"
INNER = ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fe80::1%eth0", "fd00::1", "0.0.0.0"]
INNER += ["::ffff:10.1.2.3", "64:ff9b::a9fe:a9fe", "2002:a01:203::1", "224.0.0.1", "::"]
INNER += ["100.64.0.1", "fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1", "::ffff:0:7f00:1"]


@pytest.mark.parametrize(
    ("allowed", "url", "is_allowed"),
    [
        ([], "https://hooks.example/", False),
        (["hooks.example"], "https://HOOKS.example./", True),
        (["hooks.example"], "https://evil.hooks.example/", False),
        (["hooks.example"], f"http://{PUBLIC}/", False),
        (["*"], "http://any.example/", True),
        (["*"], f"http://{PUBLIC}/", True),
        (["*"], "http://10.1.2.3/", False),
        (["*"], "http://[::1]/", False),
        (["10.0.0.0/8"], "http://10.1.2.3:8080/", True),
        (["10.0.0.0/8"], "http://11.1.2.3/", False),
        (["fd00::/8"], "http://[fd00::5]/", True),
    ],
)
def test_hosts_of_requests(allowed: list[str], url: str, is_allowed: bool) -> None:
    if is_allowed:
        hosts(*allowed).check_url(url)
    else:
        with pytest.raises(InputError):
            hosts(*allowed).check_url(url)


def test_addresses_of_deliveries() -> None:
    """A name of the list may lead to a public address only, or to one of a listed network."""
    assert not any(map(hosts("*", "hooks.example").allows_address, INNER))
    assert all(map(hosts("*").allows_address, [PUBLIC, "2606:4700::1111", f"64:ff9b::{PUBLIC}"]))
    assert all(map(hosts("0.0.0.0/0", "::/0").allows_address, [PUBLIC, *INNER]))


async def test_a_remix_has_its_own_webhook(tmp_path: Path) -> None:
    """That of the video may be of another client; the same checks apply to its own one."""
    jobs = make_jobs(tmp_path / "jobs")
    name = await jobs.create({"webhook_url": "http://localhost/first"})
    path, prompt = f"/v1/videos/{name}/remix", {"prompt": "a blue star"}
    for fields, url in (({}, None), ({"webhook_url": "http://localhost/x"}, "http://localhost/x")):
        _, _, video = await jobs.request(path, prompt | fields)
        assert jobs.service.find_job(video["id"]).webhook_url == url
    for url in ("http://evil.example/", "x"):
        status, _, answer = await jobs.request(path, prompt | {"webhook_url": url})
        assert (status, answer["error"]["param"]) == (400, "webhook_url")


async def test_events_are_signed_and_repeated(tmp_path: Path, receiver: Receiver) -> None:
    """openai's client accepts the signatures; redirects and errors are no deliveries."""
    jobs = make_jobs(tmp_path / "jobs")
    names = [await jobs.create({"webhook_url": receiver.url, "seed": 3}) for _ in range(3)]
    receiver.statuses = iter((302, 500, 0))
    async with delivering(jobs) as attempts:
        jobs.complete(names[0])
        await wait_until_delivered(jobs)
        jobs.start_idle_ranks()
        jobs.handle_rank_message("failed", job=names[1], code="out_of_memory", message="Full.")
        await wait_until_delivered(jobs)
        for name in names:
            await jobs.delete(name)
        await wait_until_delivered(jobs)
    events = receiver.list_events()
    assert events[:5] == [("video.completed", names[0])] * 4 + [("video.failed", names[1])]
    assert sorted(events[5:]) == sorted(("video.deleted", name) for name in names)
    assert attempts == ["repeated"] * 3 + ["delivered"] * 5
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 5
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    for headers, body in receiver.received:
        client.webhooks.verify_signature(body, headers)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.verify_signature(receiver.received[0][1] + b" ", receiver.received[0][0])
    video = json.loads(receiver.received[0][1])["data"]
    assert (video["status"], video["seed"], video["object"]) == ("completed", 3, "video")
    assert await jobs.service.journal.save()
    jobs.service.journal.vacuum()
    assert jobs.find_files_with("token=private") == []
    assert jobs.service.journal.count_deliveries("webhook") == 0


async def test_events_after_a_restart(tmp_path: Path, receiver: Receiver) -> None:
    """Every third delivery fails; each event is sent, those of a job in their order."""
    jobs = make_jobs(tmp_path / "jobs")
    names = [await jobs.create({"webhook_url": receiver.url}) for _ in range(6)]
    receiver.statuses = iter([200, 200, 500] * 1000)
    async with delivering(jobs):
        for name in names[:3]:
            jobs.complete(name)
        await wait_until(lambda: receiver.received)
    for name in names[3:]:
        jobs.complete(name)
    assert await jobs.service.journal.save()
    jobs.service.journal.close()
    restarted = make_jobs(tmp_path / "jobs")
    async with delivering(restarted):
        await wait_until_delivered(restarted)
        for name in names[::2]:
            await restarted.delete(name)
        await wait_until_delivered(restarted)
    events = receiver.list_events()
    for name in names:
        kinds = [*dict.fromkeys(kind for kind, job in events if job == name)]
        deleted = ["video.deleted"] if name in names[::2] else []
        assert kinds == ["video.completed", *deleted]


async def test_only_recorded_ends_are_sent(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is killed and restarted would contradict an end that is not on disk."""
    jobs = make_jobs(tmp_path / "jobs")
    name = await jobs.create({"webhook_url": receiver.url})
    path = jobs.folder / "journal.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        jobs.complete(name)
        save = mock.AsyncMock(wraps=jobs.service.journal.save)
        monkeypatch.setattr(jobs.service.journal, "save", save)
        async with delivering(jobs):
            await wait_until(lambda: save.called)  # the deliveries wait for the journal
            await asyncio.sleep(0.1)
            assert receiver.received == []
            jobs.service.delete(jobs.service.find_job(name))
            other.execute("ROLLBACK")
            await wait_until_delivered(jobs)
    assert receiver.list_events() == [("video.deleted", name)]


async def test_names_are_resolved_at_each_delivery(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`localhost` was allowed, but is not public; after three days the event is given up."""
    jobs = make_jobs(tmp_path / "jobs")
    name = await jobs.create({"webhook_url": receiver.url})
    jobs.complete(name)
    async with delivering(jobs, hosts("localhost", "*")) as attempts:
        await wait_until(lambda: len(attempts) > 1)
        monkeypatch.setattr(webhooks, "GIVE_UP_SECONDS", 0.0)
        await wait_until_delivered(jobs)
    assert receiver.received == [] and {*attempts[:-1]} == {"repeated"}
    assert attempts[-1] == "given_up"


async def test_a_receiver_that_is_gone(tmp_path: Path, receiver: Receiver) -> None:
    """410 ends the repetitions of an event; other errors do not, such as 404."""
    jobs = make_jobs(tmp_path / "jobs")
    name = await jobs.create({"webhook_url": receiver.url})
    jobs.complete(name)
    receiver.statuses = iter((404, 410))
    async with delivering(jobs) as attempts:
        await wait_until_delivered(jobs)
        await jobs.delete(name)  # a further event
        await wait_until_delivered(jobs)
    assert attempts == ["repeated", "given_up", "delivered"]
    assert receiver.list_events(only_accepted=True) == [("video.deleted", name)]


async def test_a_slow_receiver_delays_no_other(tmp_path: Path, receiver: Receiver) -> None:
    jobs = make_jobs(tmp_path / "jobs")
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    urls = [f"http://127.0.0.1:{port}/"] * 6 + [receiver.url]
    for url in urls:
        jobs.complete(await jobs.create({"webhook_url": url}))
    async with delivering(jobs) as attempts:
        await wait_until(lambda: receiver.received)
        assert "repeated" not in attempts
    silent.close()


Names = dict[str, list[str]]


def resolve_as(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the resolver return addresses for names; other names and addresses stay as they are."""
    resolve = socket.getaddrinfo

    def find_addresses(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        addresses = names.get(host, [host])
        return [resolve(address, *args, **kwargs)[0] for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", find_addresses)


@asynccontextmanager
async def listening(behavior: str, port: int, opened: list[str]) -> AsyncIterator[None]:
    """A receiver at 127.0.0.2 that does not answer; `opened` gets an entry a connection."""

    async def handle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(behavior)
        if behavior == "wrong":
            writer.write(b"SSH-2.0-x\r\n\r\n")
        if behavior == "broken":
            writer.write(b"HTTP/1.1 500 Error\r\n\r\n")
        if behavior != "silent":
            writer.close()

    if behavior == "refusing":
        yield
    elif behavior == "full":  # of connections that nobody accepts: further ones hang
        with socket.create_server(("127.0.0.2", port), backlog=0), ExitStack() as clients:
            for _ in range(4):
                client = clients.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.2", port))
            yield
    else:
        server = await asyncio.start_server(handle, "127.0.0.2", port)
        yield
        server.close()


@pytest.mark.parametrize("behavior", ["refusing", "full", "closing", "wrong", "silent", "broken"])
async def test_the_next_address_is_tried(
    behavior: str, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or at a later attempt if the first address accepts the event."""
    monkeypatch.setattr(webhooks, "_CONNECT_SECONDS", 0.1)
    if behavior == "silent":
        monkeypatch.setattr(webhooks, "SEND_SECONDS", 1.0)
    if behavior not in ("silent", "broken"):  # the first one is tried first
        monkeypatch.setattr(random, "sample", lambda addresses, _: addresses)
    resolve_as({"hook.example": ["127.0.0.2", "127.0.0.1"]}, monkeypatch)
    allowed, opened = hosts("hook.example", "127.0.0.0/8"), list[str]()
    jobs = make_jobs(tmp_path / "jobs", allowed)
    names = [
        await jobs.create({"webhook_url": f"http://hook.example:{receiver.server_port}/"})
        for _ in range(3)
    ]
    async with (
        listening(behavior, receiver.server_port, opened),
        delivering(jobs, allowed) as attempts,
    ):
        for name in names:
            jobs.complete(name)
            await wait_until_delivered(jobs)
    assert attempts.count("repeated") == (len(opened) if behavior in ("silent", "broken") else 0)
    assert receiver.list_events() == [("video.completed", name) for name in names]
    assert len(opened) == 3 * (behavior in ("closing", "wrong")) + attempts.count("repeated")


@pytest.mark.parametrize("is_first", [True, False])
async def test_one_forbidden_address_refuses_all(
    is_first: bool, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ["127.0.0.1", "127.0.0.2"][:: -1 if is_first else 1]
    resolve_as({"hook.example": addresses}, monkeypatch)
    allowed = hosts("hook.example", "127.0.0.1")
    jobs = make_jobs(tmp_path / "jobs", allowed)
    url = f"http://hook.example:{receiver.server_port}/"
    jobs.complete(await jobs.create({"webhook_url": url}))
    async with delivering(jobs, allowed) as attempts:
        await wait_until(lambda: attempts)
    assert (attempts, receiver.received) == (["repeated"], [])


async def test_a_slow_receiver_with_many_names(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets four events at a time, and the others are not delayed."""
    resolve_as({"a.example": ["127.0.0.1"], "b.example": ["127.0.0.3", "::1"]}, monkeypatch)
    allowed, opened = hosts("*", "127.0.0.0/8", "::1"), list[asyncio.StreamWriter]()
    jobs = make_jobs(tmp_path / "jobs", allowed)
    silent = await asyncio.start_server(lambda _, writer: opened.append(writer), "0.0.0.0", 0)
    port = silent.sockets[0].getsockname()[1]
    spellings = [
        "a.example",
        "A.Example",
        "localhost",
        "LOCALHOST",
        "127.0.0.1",
        "127.1",
        "b.example",
    ]
    spellings += ["2130706433", "0x7f000001", "[::ffff:127.0.0.1]", "[::FFFF:7F00:1]", "127.0.0.2"]
    for name in spellings * 2:
        jobs.complete(await jobs.create({"webhook_url": f"http://{name}:{port}/"}))
    jobs.complete(await jobs.create({"webhook_url": receiver.url}))
    async with delivering(jobs, allowed) as attempts:
        await wait_until(lambda: len(opened) > 3 and attempts)
        assert (len(opened), attempts) == (4, ["delivered"])
    silent.close()


async def test_many_ports_of_one_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine gets half of the deliveries at most, and another name of it none further."""
    resolve_as({"hook.example": ["127.0.0.9", "127.0.0.1"]}, monkeypatch)
    allowed, opened = hosts("hook.example", "127.0.0.0/8"), list[asyncio.StreamWriter]()
    jobs = make_jobs(tmp_path / "jobs", allowed)
    async with AsyncExitStack() as servers:
        for name in ("127.0.0.1", "127.0.0.1", "127.0.0.1", "hook.example"):
            silent = await asyncio.start_server(lambda _, x: opened.append(x), "127.0.0.1", 0)
            servers.callback(silent.close)
            port = silent.sockets[0].getsockname()[1]
            for _ in range(4):
                jobs.complete(await jobs.create({"webhook_url": f"http://{name}:{port}/"}))
        async with delivering(jobs, allowed) as attempts:
            await wait_until(lambda: len(opened) == 8)
            await asyncio.sleep(0.1)
            assert (len(opened), attempts) == (8, [])


async def test_a_clock_that_is_set_gives_nothing_up(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine days later by the clock, and after a restart, an event is still sent again."""
    jobs, real = make_jobs(tmp_path / "jobs"), time.time
    jobs.complete(await jobs.create({"webhook_url": receiver.url}))
    assert await jobs.service.journal.save()
    monkeypatch.setattr(time, "time", lambda: real() + 9 * 86400)
    receiver.statuses = iter([500] * 4)
    async with delivering(jobs) as attempts:
        await wait_until(lambda: len(attempts) > 1)
    async with delivering(make_jobs(tmp_path / "jobs")) as later_attempts:
        await wait_until(lambda: len(later_attempts) > 1)
    assert {*attempts} == {"repeated"} and later_attempts[0] == "repeated"


PAUSES: dict[str, tuple[str, list[int]]] = {
    # attempts (f: fails, p: is postponed, d: is done), and the longest pauses after each
    "doubled, up to the longest": ("fffffff", [1, 2, 4, 8, 9, 9, 9]),
    "postponed": ("fppf", [1, 4, 4, 2]),
    "from the start after a success": ("fffdff", [1, 2, 4, 0, 1, 2]),
}


@pytest.mark.parametrize("part", [0.0, 1.0], ids=["shortest", "longest"])
@pytest.mark.parametrize("case", PAUSES)
async def test_pauses_grow(
    case: str, part: float, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In seconds; half of each pause is random."""
    attempts, longest = PAUSES[case]
    pauses, journal = list[float](), jobs.service.journal
    schedule_delivery = journal.schedule_delivery

    def note_pause(kind: str, name: str, seconds: float, failures: int) -> None:
        pauses.append(seconds)
        schedule_delivery(kind, name, 0.0, failures)

    async def perform(_: ServiceJob) -> bool:
        result = attempts[len(pauses)] if len(pauses) < len(attempts) else "d"
        if result == "p":
            raise deliveries.PostponedError
        return result == "d"

    def uniform(low: float, high: float) -> float:
        return low + part * (high - low)

    monkeypatch.setattr(deliveries, "random", SimpleNamespace(uniform=uniform))
    monkeypatch.setattr(journal, "schedule_delivery", note_pause)
    jobs.complete(await jobs.create())
    jobs.service.deliveries.kinds["store"] = deliveries.DeliveryKind(perform, 1, 1, longest=9)
    async with running(jobs.service.deliveries.run()):
        await wait_until(lambda: len(pauses) >= len(attempts))
    expected = [pause * (0.5 + part / 2) for pause in longest]
    assert pauses[: len(attempts)] == pytest.approx(expected)


async def test_deliveries_of_a_receiver(jobs: Jobs) -> None:
    """At most two of one and four in all at a time; each that ends makes room for the next."""
    running_ids, ends, journal = list[str](), dict[str, asyncio.Event](), jobs.service.journal

    async def perform(job: ServiceJob) -> bool:
        running_ids.append(job.id)
        ends[job.id] = asyncio.Event()
        await ends[job.id].wait()
        running_ids.remove(job.id)
        journal.update_ended(job.id, webhook_sent=job.state)
        return True

    async def wait_for(*names: str) -> None:
        await wait_until(lambda: sorted(running_ids) == sorted(names))

    for name in ("a1", "a2", "a3", "b1", "b2", "b3", "c1"):
        url = f"http://{name[0]}.example/{name}"
        job = ServiceJob(name, {}, "completed", ended=time.time(), webhook_url=url)
        journal.restore_job(job)
    jobs.service.deliveries.kinds["webhook"] = deliveries.DeliveryKind(perform, 4, 2, longest=9)
    async with running(jobs.service.deliveries.run()):
        await wait_for("a1", "a2", "b1", "b2")
        ends["a1"].set()
        await wait_for("a2", "a3", "b1", "b2")
        ends["a2"].set()
        await wait_for("a3", "b1", "b2", "c1")
        ends["b1"].set()
        await wait_for("a3", "b2", "b3", "c1")
        for name in ("a3", "b2", "b3", "c1"):
            ends[name].set()
        await wait_for()
        journal.update_ended("a1", webhook_sent="")
        await wait_for("a1")
