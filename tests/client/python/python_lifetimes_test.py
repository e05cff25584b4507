#!/usr/bin/env python3
"""The Python package: closing, signals, threads, forks, deaths, asyncio (ctest `python_lifetimes_test`):
python_lifetimes_test.py --bin-dir DIR --source-dir DIR, with PYTHONPATH=build/release/python."""
import asyncio
import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref

import kvmill
from python_support import HEADS, LAYERS, Case, cli_support, gaussian, relative_error, spec


def interrupt_the_call():
    """A thread that presses Ctrl-C when the main thread waits for a call of the package."""
    main, package = threading.main_thread().ident, os.path.dirname(kvmill.__file__)

    def press():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if sys._current_frames()[main].f_code.co_filename.startswith(package):  # pylint: disable=protected-access
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.001)

    return threading.Thread(target=press, daemon=True)


class LifetimesTest(Case):
    def test_errors_carry_code_text_and_a_hint(self):
        from kvmill._errors import error_of  # pylint: disable=import-outside-toplevel

        error = error_of(8, "full", 100)
        self.assertIsInstance(error, kvmill.ResourceExhaustedError)
        self.assertEqual((error.code, error.message, error.retry_after), (kvmill.Code.RESOURCE_EXHAUSTED, "full", 0.1))
        self.assertEqual(str(error), "RESOURCE_EXHAUSTED: full")
        self.assertIsNone(error_of(14, "gone", 0).retry_after)
        self.assertIsInstance(error_of(14, "gone", 0), ConnectionError)
        self.assertIsInstance(error_of(4, "late", 0), TimeoutError)
        self.assertIs(error_of(99, "new", 0).code, kvmill.Code.UNKNOWN)
        copy = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(copy), copy.code, copy.retry_after), (type(error), error.code, 0.1))

    def test_a_closed_client_says_so(self):
        ns = self.open()
        self.client.close()
        self.client.close()
        self.assertTrue(self.client.closed)
        for call in (self.client.stat, lambda: self.client.lookup(ns, [b"x"]), lambda: self.client.boot_id):
            with self.assertRaisesRegex(kvmill.FailedPreconditionError, "closed"):
                call()
        with kvmill.Client(self.daemon.server) as other:
            self.assertEqual(other.lookup(ns, [b"x"]).hit_blocks, 0, "the namespace outlives its client")
        self.assertTrue(other.closed)
        for thing in (self.client, ns):
            with self.assertRaises(TypeError):
                pickle.dumps(thing)

    def test_without_a_daemon_calls_are_unavailable(self):
        with kvmill.Client("unix:/nowhere/kvmill.sock") as client:
            with self.assertRaises(kvmill.UnavailableError):
                client.stat()
        self.client.stat()
        with self.stopped(), self.assertRaises(kvmill.DeadlineExceededError):
            self.client.stat(timeout=0.05)

    def test_threads_share_a_client_and_do_not_wait_for_each_other(self):
        ns = self.open()
        errors = []

        def work(number):
            try:
                for i in range(20):
                    key = b"thread %d block %d" % (number, i)
                    layers = gaussian(100 * number + i)
                    self.put(ns, key, layers)
                    if relative_error(layers, self.get(ns, key)) > 0.35:
                        errors.append(key)
            except Exception as error:  # pylint: disable=broad-except
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    def test_the_gil_is_free_while_a_call_waits(self):
        self.client.stat()
        timed_out = []

        def wait():
            try:
                self.client.stat(timeout=1)
            except kvmill.DeadlineExceededError:
                timed_out.append(True)

        with self.stopped():
            thread = threading.Thread(target=wait)
            thread.start()
            turns = 0
            while thread.is_alive():
                turns += 1
                time.sleep(0.001)
        self.assertEqual(timed_out, [True])
        self.assertGreater(turns, 2)

    def test_closing_ends_the_calls_of_other_threads(self):
        def end_four_calls(seconds):
            errors = []
            client = kvmill.Client(self.daemon.server, timeout=60)

            def wait():
                try:
                    client.stat()
                except kvmill.Error as error:
                    errors.append(error.code)

            client.stat()
            with self.stopped():
                threads = [threading.Thread(target=wait) for _ in range(4)]
                for thread in threads:
                    thread.start()
                time.sleep(seconds)
                client.close()
                for thread in threads:
                    thread.join()
            return errors

        for attempt in range(1, 8):
            errors = end_four_calls(0.1 * attempt ** 2)
            if kvmill.Code.FAILED_PRECONDITION not in errors:  # On a busy machine one may come only after the end.
                break
        self.assertEqual(errors, [kvmill.Code.CANCELLED] * 4)

    def test_memory_is_let_go_of_when_a_call_has_ended(self):
        ns = self.open()
        layers = gaussian(9)
        alive = [weakref.ref(a) for layer in layers for a in layer]
        self.put(ns, b"key", layers)
        with self.assertRaises(kvmill.InvalidArgumentError):
            self.client.store(ns, [kvmill.Block(b"other", [layers[0], (layers[1][0], layers[1][1][:3])])])
        del layers
        gc.collect()
        self.assertEqual([a() for a in alive], [None] * len(alive))
        fixed = bytearray(HEADS * ns.record_bytes(0))
        self.client.fetch_records(ns, [b"key"], [[fixed, bytearray(len(fixed))]])
        fixed.append(1)  # BufferError while it is pinned.

    def test_ctrl_c_interrupts_a_waiting_call_and_its_memory_stays(self):
        ns = self.open()
        out = ns.empty(1)
        alive = weakref.ref(out[0][0][0])

        with self.stopped():
            user = interrupt_the_call()
            with self.assertRaises(KeyboardInterrupt):
                user.start()
                self.client.fetch(ns, [b"key"], out)
            user.join()
            del out
            gc.collect()
            self.assertIsNotNone(alive())
            self.client.close()
        gc.collect()
        self.assertIsNone(alive())

    def test_what_ctrl_c_left_behind_goes_when_its_call_has_ended(self):
        ns = self.open()
        self.put(ns, b"key", gaussian(1))
        for number in range(5):
            out = ns.empty(1)
            alive = weakref.ref(out[0][0][0])
            with self.stopped():
                user = interrupt_the_call()
                begin = time.monotonic()
                with self.assertRaises(KeyboardInterrupt):
                    user.start()
                    self.client.fetch(ns, [b"key"], out, timeout=60)
                self.assertLess(time.monotonic() - begin, 30, "it waited for the call")
                user.join()
                del out
                gc.collect()
                self.assertIsNotNone(alive(), number)
            for _ in range(1000):
                self.client.stat()  # The client goes on.
                gc.collect()
                if alive() is None:
                    break
                time.sleep(0.01)
            self.assertIsNone(alive(), "the memory is still pinned")
        self.assertLess(relative_error(gaussian(1), self.get(ns, b"key")), 0.35)

    def test_many_clients_leave_nothing_behind(self):
        def cycle(count):
            for i in range(count):
                with kvmill.Client(self.daemon.server) as client:
                    if i % 4 == 0:
                        client.stat()
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        before = cycle(8)
        after = cycle(200)
        for _ in range(2000):  # gRPC closes a connection soon after its channel went.
            if after <= before:
                break
            time.sleep(0.01)
            after = len(os.listdir("/proc/self/fd"))
        self.assertLessEqual(after, before)

    def test_a_child_of_fork_is_told_so_and_the_parent_goes_on(self):
        self.client.stat()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = "nothing"
            try:
                self.client.stat()
            except kvmill.FailedPreconditionError as error:
                said = str(error)
            try:
                kvmill.Client(self.daemon.server)
                said = "a client was made"
            except kvmill.FailedPreconditionError as error:
                said += str(error)
            self.client.close()
            os.write(write, said.encode())
            os._exit(0)  # pylint: disable=protected-access
        os.close(write)
        _, status = os.waitpid(child, 0)
        self.assertEqual(status, 0)
        with os.fdopen(read) as pipe:
            self.assertIn("fork", pipe.read())
        self.client.stat()

    def test_processes_started_by_spawn_make_their_own(self):
        ns = self.open()
        self.put(ns, b"key", gaussian(10))
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            self.assertEqual(pool.map(fetch_elsewhere, [(self.daemon.server, ns.name)] * 4), [True] * 4)

    def test_a_process_that_closes_nothing_ends_well(self):
        script = ("import kvmill, sys\n"
                  "client = kvmill.Client(sys.argv[1])\n"
                  "print(len(client.stat().boot_id))\n"
                  "cycle = [client]; cycle.append(cycle)\n")
        done = subprocess.run([sys.executable, "-c", script, self.daemon.server], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "32\n", ""))


def fetch_elsewhere(where):
    address, name = where
    with kvmill.Client(address) as client:
        ns = client.find_namespace(name)
        return client.fetch(ns, [b"key"], ns.empty(1)).blocks[0].hit


class AsyncTest(Case):
    def run_async(self, body):
        async def run():
            async with kvmill.AsyncClient(self.daemon.server, timeout=60) as client:
                return await body(client)

        return asyncio.run(run())

    def test_many_calls_are_in_flight_at_once(self):
        async def body(client):
            ns = await client.open_namespace(self.id(), spec(revision=self.id()))

            async def one(number):
                layers = gaussian(number)
                key = b"key %d" % number
                await client.store(ns, [kvmill.Block(key, layers)])
                out = ns.empty(1)
                fetched = await client.fetch(ns, [key], out)
                return fetched.blocks[0].hit and relative_error(layers, out[0]) < 0.35

            return await asyncio.gather(*(one(number) for number in range(40)))

        self.assertEqual(self.run_async(body), [True] * 40)

    def test_every_call_works(self):
        async def body(client):
            ns = await client.open_namespace(self.id(), spec(revision=self.id()))
            self.assertEqual((await client.find_namespace(self.id())).fingerprint, ns.fingerprint)
            await client.store(ns, [kvmill.Block(b"key", gaussian(1))], wait_durable=True)
            self.assertEqual((await client.lookup(ns, [b"key"])).hit_blocks, 1)
            records = [bytearray(HEADS * ns.record_bytes(0)) for _ in range(LAYERS)]
            self.assertTrue((await client.fetch_records(ns, [b"key"], [records])).blocks[0].hit)
            pages = [bytearray(ns.page_bytes_max(0)) for _ in range(LAYERS)]
            self.assertTrue((await client.fetch_pages(ns, [b"key"], [pages])).blocks[0].hit)
            self.assertEqual(await client.remove(ns, [b"key"]), 1)
            self.assertEqual(await client.clear(ns), 0)
            self.assertGreaterEqual(await client.flush(), 0)
            self.assertEqual((await client.stat()).boot_id, client.boot_id)
            with self.assertRaises(kvmill.NotFoundError):
                await client.find_namespace("none")
            with self.assertRaises(kvmill.InvalidArgumentError):
                await client.lookup(ns, [b""])

        self.run_async(body)
        for name, method in inspect.getmembers(kvmill.Client, inspect.isfunction):
            if not name.startswith("_"):
                waits = name not in ("cancel_redeem", "export_memory", "ready_pages")
                self.assertEqual(inspect.iscoroutinefunction(getattr(kvmill.AsyncClient, name)), waits, name)
                self.assertEqual(list(inspect.signature(method).parameters.values()),
                                 list(inspect.signature(getattr(kvmill.AsyncClient, name)).parameters.values()), name)
                self.assertTrue(method.__doc__ and getattr(kvmill.AsyncClient, name).__doc__, name)

    def test_a_cancelled_task_leaves_its_memory_to_the_call(self):
        ns = self.open()

        async def body(client):
            out = ns.empty(1)
            alive = weakref.ref(out[0][0][0])
            await client.stat()
            with self.stopped():
                task = asyncio.ensure_future(client.fetch(ns, [b"key"], out))
                await asyncio.sleep(0.05)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                del out, task
                gc.collect()
                self.assertIsNotNone(alive())
            for _ in range(1000):
                if alive() is None:
                    return
                await asyncio.sleep(0.01)
            self.fail("the memory is still pinned")

        self.run_async(body)

    def test_ctrl_c_ends_the_loop_at_once(self):
        ns = self.open()
        out = ns.empty(1)
        alive = weakref.ref(out[0][0][0])

        async def body(client):
            await client.fetch(ns, [b"key"], out)

        with self.stopped():
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
            begin = time.monotonic()
            with self.assertRaises(KeyboardInterrupt):
                timer.start()
                self.run_async(body)
            self.assertLess(time.monotonic() - begin, 30, "it waited for the call")
            timer.join()
        del out, body
        gc.collect()
        self.assertIsNone(alive())

    def test_closing_cancels_what_is_in_flight(self):
        async def run():
            client = kvmill.AsyncClient(self.daemon.server)
            await client.stat()
            with self.stopped():
                calls = [asyncio.ensure_future(client.stat()) for _ in range(10)]
                await asyncio.sleep(0.05)
                await client.close()
            results = await asyncio.gather(*calls, return_exceptions=True)
            await client.close()
            with self.assertRaises(kvmill.FailedPreconditionError):
                await client.stat()
            return [type(result) for result in results]

        self.assertEqual(asyncio.run(run()), [kvmill.CallCancelledError] * 10)

    def test_a_client_that_is_dropped_with_calls_in_flight_ends_them(self):
        loop = asyncio.new_event_loop()
        client = kvmill.AsyncClient(self.daemon.server, timeout=60)
        loop.run_until_complete(client.stat())
        dropped = weakref.ref(client)
        with self.stopped():
            task = loop.create_task(client.stat())
            loop.run_until_complete(asyncio.sleep(0.05))
            task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
            begin = time.monotonic()
            del client, task, loop
            gc.collect()
            self.assertIsNone(dropped())
            self.assertLess(time.monotonic() - begin, 30, "it waited for the deadline")

    def test_a_client_follows_to_another_loop_when_it_is_idle(self):
        client = kvmill.AsyncClient(self.daemon.server)
        boot_ids = {asyncio.run(stat_of(client)) for _ in range(3)}
        self.assertEqual(len(boot_ids), 1)
        asyncio.run(client.close())


async def stat_of(client):
    return (await client.stat()).boot_id


class DeathTest(Case):
    own_daemon = True

    def test_a_daemon_that_dies_ends_each_call_once(self):
        ns = self.open()
        boot_id = self.client.boot_id
        ended = []

        async def run():
            async with kvmill.AsyncClient(self.daemon.server, timeout=60) as client:
                await client.stat()
                with self.stopped():
                    calls = [asyncio.ensure_future(call) for _ in range(10) for call in
                             (client.stat(), client.fetch(ns, [b"key"], ns.empty(1)),
                              client.store(ns, [kvmill.Block(b"key", gaussian(1))]))]
                    for call in calls:
                        call.add_done_callback(ended.append)
                    await asyncio.sleep(0.05)
                    self.daemon.kill_hard()
                return await asyncio.gather(*calls, return_exceptions=True)

        for result in asyncio.run(run()):
            self.assertIsInstance(result, kvmill.UnavailableError)
        self.assertEqual(len(ended), 30)
        with self.assertRaises(kvmill.UnavailableError):
            self.client.stat()
        self.daemon.start()
        self.put(ns, b"after", gaussian(2))  # Registered again by itself.
        self.assertNotEqual(self.client.boot_id, boot_id)

    def test_a_daemon_that_is_away_is_a_miss_for_who_wants_that(self):
        with kvmill.Client(self.daemon.server, timeout=60, when_away=kvmill.WhenAway.MISS) as client:
            ns = client.open_namespace("away", spec())
            block = kvmill.Block(b"away", gaussian(3))
            self.assertEqual(client.store(ns, [block]).away, "")
            self.daemon.kill_hard()
            found = client.lookup(ns, [b"away"])
            self.assertEqual(found.hit_blocks, 0)
            self.assertNotEqual(found.away, "")
            fetched = client.fetch(ns, [b"away"], ns.empty(1))
            self.assertIsInstance(fetched.blocks[0].error, kvmill.NotFoundError)
            self.assertNotEqual(fetched.away, "")
            stored = client.store(ns, [block])
            self.assertEqual((stored.blocks[0].outcome, stored.blocks[0].error, stored.blocks_dropped),
                             (kvmill.Outcome.DROPPED, None, 1))
            with self.assertRaises(kvmill.UnavailableError):
                client.store(ns, [block], wait_durable=True)
            self.daemon.start()
            while stored.away:
                time.sleep(0.005)
                stored = client.store(ns, [block])
            self.assertEqual(stored.blocks_stored, 1)
            self.assertEqual(client.lookup(ns, [b"away"]).hit_blocks, 1)


if __name__ == "__main__":
    cli_support.main()
