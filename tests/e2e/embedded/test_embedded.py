"""`tinsmith.ServiceClient()` where nothing is set: the service runs in the program's process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.embedded.programs import ENDS_WITHIN_S, MODEL, environment, run, running
from tests.e2e.service.positions import wait_caught_up
from tinsmith.checkpoints.format import read_adapter

TRAIN_AND_SAVE = """
client = tinsmith.ServiceClient()
training = client.create_lora_training_client(MODEL, rank=8, seed=1)
for _ in range(3):
    step(training)
sampler = training.save_weights_and_get_sampling_client()
answer = sampler.sample(TOKENS, 1, tinsmith.SamplingParams(max_tokens=8, stop=[])).result()
assert len(answer.sequences[0].tokens) == 8
say(training.save_state("three").result().path)
say(loss_of(training))
"""


def test_a_program_without_settings_trains_samples_and_resumes_in_the_next_run(
    tmp_path: Path,
) -> None:
    """It closes nothing itself: what it saved is there, and nothing is left to be recovered."""
    first = run(TRAIN_AND_SAVE, tmp_path)
    path, loss = first.stdout.split()

    told = first.stderr.splitlines()
    assert len(told) == 1
    assert "runs in this process" in told[0]
    assert str(tmp_path / ".tinsmith") in told[0]
    assert not (tmp_path / ".tinsmith" / "embedded.sock").exists()

    again = run(
        f"""
client = tinsmith.ServiceClient()
training = client.create_training_client_from_state({path!r})
assert loss_of(training) == {loss}
say([run.training_run_id for run in client.create_rest_client().iter_training_runs()])
""",
        tmp_path,
    )

    assert path.split("/")[2] in again.stdout


def test_nothing_is_printed_if_the_embedded_service_is_requested_explicitly(tmp_path: Path) -> None:
    ended = run(
        """
with tinsmith.ServiceClient(base_url="embedded") as client:
    models = client.get_server_capabilities().supported_models
    say([model.model_name for model in models])
""",
        tmp_path,
        TINSMITH_SERVE_MODELS="Qwen/Qwen3-8B=x,another=y",
    )

    assert ended.stdout.strip() == "['Qwen/Qwen3-8B', 'another']"
    assert ended.stderr == ""


def test_a_killed_program_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    with running(
        """
training = tinsmith.ServiceClient().create_lora_training_client(MODEL, rank=8, seed=1)
for _ in range(3):
    step(training)
say(training.save_state("three").result().path)
say(loss_of(training))
say(training.model_id)
while True:
    say(step(training))
""",
        tmp_path,
    ) as program:
        path, loss = program.hears(), program.hears()
        for _ in range(3):
            program.hears()
        program.process.send_signal(signal.SIGKILL)
        program.ends()

    run(
        f"""
training = tinsmith.ServiceClient().create_training_client_from_state_with_optimizer({path!r})
assert loss_of(training) == {loss}
step(training)
""",
        tmp_path,
    )


@pytest.mark.parametrize(("ending", "saved"), [("raise KeyError('oops')", 1), ("", 0)])
def test_a_program_that_ends_with_an_error_keeps_what_it_trained(
    tmp_path: Path, ending: str, saved: int
) -> None:
    """One that ended well has saved what it wanted."""
    program = f"""
training = tinsmith.ServiceClient().create_lora_training_client(MODEL, rank=8, seed=1)
step(training)
say(training.model_id)
{ending}
"""
    with running(program, tmp_path) as ended:
        model_id = ended.hears()
        ended.ends()

    left = run(
        f"""
rest = tinsmith.ServiceClient().create_rest_client()
found = rest.list_checkpoints({model_id!r}).result().checkpoints
say([one.checkpoint_id for one in found])
""",
        tmp_path,
    )

    assert left.stdout.strip() == str(["weights/autosave"] * saved)


def test_the_embedded_service_works_inside_an_event_loop_without_blocking_it(
    tmp_path: Path,
) -> None:
    """As in a notebook: blocking calls in a running loop, and coroutines beside them."""
    run(
        """
import asyncio

async def cell():
    ticks = 0
    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)
    ticking = asyncio.create_task(tick())
    client = tinsmith.ServiceClient()
    training = await client.create_lora_training_client_async(MODEL, rank=8)
    output = await training.forward_backward_async([DATUM], "cross_entropy")
    await output
    assert ticks > 5, ticks  # starting the service, and all else, left the loop free
    ticking.cancel()
    step(training)  # blocks the cell, and not the service
    await client.close_async()

asyncio.run(cell())
""",
        tmp_path,
    )


def test_threads_share_one_service_and_may_outlive_the_main_thread(tmp_path: Path) -> None:
    ended = run(
        """
def work(number):
    client = tinsmith.ServiceClient()
    training = client.create_lora_training_client(MODEL, rank=8, seed=number)
    for _ in range(5):
        step(training)
    say(training.save_state("five").result().path)

client = tinsmith.ServiceClient()
for number in range(4):
    threading.Thread(target=work, args=(number,)).start()
""",
        tmp_path,
    )

    assert len(set(ended.stdout.split())) == 4
    assert len(ended.stderr.splitlines()) == 1


def test_a_client_created_after_the_main_thread_has_ended_raises_closed_error(
    tmp_path: Path,
) -> None:
    ended = run(
        """
def work():
    threading.main_thread().join()
    try:
        tinsmith.ServiceClient()
    except tinsmith.ClosedError as error:
        say(error)

threading.Thread(target=work).start()
""",
        tmp_path,
    )

    assert "main thread" in ended.stdout


def test_a_second_process_shares_the_service_and_takes_it_over(tmp_path: Path) -> None:
    """The first one ends, well or killed, while the second one trains: it goes on unharmed."""
    serving = """
training = tinsmith.ServiceClient().create_lora_training_client(MODEL, rank=8)
say(step(training))
input()
"""
    with (
        running(serving, tmp_path) as first,
        running(
            """
input()
client = tinsmith.ServiceClient()
training = client.create_lora_training_client(MODEL, rank=8, seed=1)
losses = [step(training)]
say("trained")
input()
losses.append(step(training))
say("went on")
input()
losses += [step(training) for _ in range(2)]

alone = client.create_lora_training_client(MODEL, rank=8, seed=1)
assert losses == [step(alone) for _ in range(4)]
""",
            tmp_path,
        ) as second,
    ):
        first.hears()
        second.go_on()
        assert second.hears() == "trained"

        first.go_on()
        assert first.ends() == 0
        second.go_on()
        assert second.hears() == "went on"

        with running(serving, tmp_path) as third:  # which the second one serves
            third.hears()
            third.process.kill()
            third.ends()
        second.go_on()
        assert second.ends() == 0


def test_another_process_takes_over_the_service_of_a_killed_one(tmp_path: Path) -> None:
    with (
        running(
            'say(tinsmith.ServiceClient().get_server_capabilities() and "up"); input()', tmp_path
        ) as first,
        running(
            """
input()
training = tinsmith.ServiceClient().create_lora_training_client(MODEL, rank=8, seed=1)
pending = [training.forward_backward([DATUM], "cross_entropy") for _ in range(3)]
step(training)
say("trained")
input()
assert all(one.result().loss == pending[0].result().loss for one in pending)
say(step(training))
""",
            tmp_path,
        ) as second,
    ):
        assert first.hears() == "up"
        second.go_on()
        assert second.hears() == "trained"

        first.process.kill()
        first.ends()
        second.go_on()

        assert float(second.hears()) > 0
        assert second.ends() == 0


def test_a_forked_child_reaches_its_parent_s_service_and_outlives_it(tmp_path: Path) -> None:
    ended = run(
        """
client = tinsmith.ServiceClient()
training = client.create_lora_training_client(MODEL, rank=8)
step(training)
parent = os.getpid()
if os.fork():
    step(training)  # it goes on serving itself
    sys.exit()
try:
    step(training)
except tinsmith.ClosedError:
    say("refused")
mine = tinsmith.ServiceClient().create_lora_training_client(MODEL, rank=8)
step(mine)
say("child trained")
while os.getppid() == parent:
    time.sleep(0.01)
step(mine)
say("child alone")
""",
        tmp_path,
    )

    # The output ends when the child has ended: it has the pipe too.
    assert ended.stdout.splitlines() == ["refused", "child trained", "child alone"]


def test_without_the_server_extra_the_error_names_the_install_command(tmp_path: Path) -> None:
    """Whoever forgot a key is told that as well, as ever."""
    ended = run(
        """
sys.modules["pyrage"] = None  # as if it were not installed
try:
    tinsmith.ServiceClient()
except tinsmith.AuthenticationError as error:
    say(error)
try:
    tinsmith.ServiceClient(base_url="embedded")
except tinsmith.ValidationError as error:
    say(error)
""",
        tmp_path,
    )

    unset, named = ended.stdout.splitlines()
    assert "TINKER_API_KEY" in unset
    for said in (unset, named):
        assert "pip install 'tinsmith[server]'" in said


def test_a_data_folder_in_use_by_tinsmith_serve_is_reported_with_a_fix(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tinsmith", "serve", "--port", "0", "--model", MODEL]
    with subprocess.Popen(
        command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    ) as serving:
        try:
            assert serving.stderr is not None
            assert any("serving on" in line for line in iter(serving.stderr.readline, ""))

            ended = run(
                """
try:
    tinsmith.ServiceClient().get_server_capabilities()
except tinsmith.LedgerUnavailableError as error:
    say(error)
""",
                tmp_path,
            )
        finally:
            serving.terminate()
            serving.communicate()

    assert f"process {serving.pid}" in ended.stdout
    assert "TINKER_BASE_URL" in ended.stdout
    assert "TINSMITH_HOME" in ended.stdout


def test_the_owner_of_the_data_folder_needs_no_api_key(tmp_path: Path) -> None:
    """A key that is given all the same is the key's tenant, and a wrong one is refused."""
    made = subprocess.run(
        [sys.executable, "-m", "tinsmith", "key", "create", "--tenant", "alice", "-f", "json"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    key = json.loads(made.stdout)["key"]

    run(
        f"""
mine = tinsmith.ServiceClient()
path = mine.create_lora_training_client(MODEL, rank=8).save_state("mine").result().path
hers = tinsmith.ServiceClient(base_url="embedded", api_key={key!r})
try:
    hers.create_training_client_from_state(path)
    say("not refused")
except tinsmith.NotFoundError:
    pass
wrong = tinsmith.ServiceClient(base_url="embedded", api_key="tml-wrong")
try:
    wrong.get_server_capabilities()
    say("not refused")
except tinsmith.AuthenticationError:
    pass
""",
        tmp_path,
    )


def test_a_closed_service_restarts_with_the_next_call(tmp_path: Path) -> None:
    run(
        """
from tinsmith.service.run import embedded_service

client = tinsmith.ServiceClient()
training = client.create_lora_training_client(MODEL, rank=8)
first = step(training)
embedded_service.close()
assert not [thread.name for thread in threading.enumerate() if thread.name == "tinsmith-service"]
assert step(training) < first
""",
        tmp_path,
    )


def test_a_service_that_is_closed_during_startup_does_not_start(tmp_path: Path) -> None:
    run(
        """
from tinsmith.client.embedding import HerePlace
from tinsmith.errors import ClosedError
from tinsmith.service.run import embedded_service

asked = embedded_service.place()
embedded_service.close()
assert isinstance(asked.exception(60), ClosedError)
assert isinstance(embedded_service.place().result(60), HerePlace)
""",
        tmp_path,
    )


@pytest.mark.parametrize("is_set", ["TINKER_API_KEY", "TINKER_BASE_URL"])
def test_a_configured_base_url_or_key_never_falls_back_to_the_embedded_service(
    tmp_path: Path, is_set: str
) -> None:
    value = {"TINKER_API_KEY": "tml-x", "TINKER_BASE_URL": "http://127.0.0.1:9"}[is_set]
    ended = run(
        """
try:
    say(tinsmith.ServiceClient())
except tinsmith.AuthenticationError as error:
    say(error)
""",
        tmp_path,
        **{is_set: value},
    )

    assert "embedded" not in ended.stdout


def test_checkpoints_can_be_downloaded_with_base_url_embedded(tmp_path: Path) -> None:
    """From its own process, and from that of a program that runs the service."""
    path, _ = run(TRAIN_AND_SAVE, tmp_path).stdout.split()
    download = ["checkpoint", "download", path, "--base-url", "embedded", "-f", "json"]
    serving = 'say(tinsmith.ServiceClient().get_server_capabilities() and "up"); input()'

    alone = command(tmp_path, *download, "-o", str(tmp_path / "first"))
    with running(serving, tmp_path) as program:
        program.hears()
        beside = command(tmp_path, *download, "-o", str(tmp_path / "second"))
    listed = command(tmp_path, "checkpoint", "list", "--base-url", "embedded", "-f", "json")

    for ended in (alone, beside):
        adapter = read_adapter(Path(ended["destination"]))
        assert adapter.rank == 8
    assert path in [checkpoint["tinker_path"] for checkpoint in listed["checkpoints"]]


def test_a_command_that_runs_the_service_closes_it_when_it_ends(tmp_path: Path) -> None:
    """Else it ends as if it was killed: in the midst of bringing models back, say."""
    command(tmp_path, "run", "list", "--base-url", "embedded", "-f", "json")

    assert (tmp_path / ".tinsmith" / "ledger").exists()
    assert not (tmp_path / ".tinsmith" / "embedded.sock").exists()


def command(home: Path, *words: str) -> Any:
    """What a command of ours prints, in JSON."""
    ended = subprocess.run(
        [sys.executable, "-m", "tinsmith", *words],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_tokens_stream_and_samplers_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    """A stream that is left early leaves nothing behind that keeps the program from ending."""
    run(
        """
import pickle, subprocess
client = tinsmith.ServiceClient()
sampler = client.create_sampling_client(base_model=MODEL)
params = tinsmith.SamplingParams(max_tokens=50, seed=1)
with sampler.sample_stream(TOKENS, 1, params) as stream:
    tokens = [token for event in stream for token in event.tokens]
assert tokens == list(stream.result().sequences[0].tokens)
with sampler.sample_stream(TOKENS, 1, params) as left:
    next(iter(left))

there = (
    "import pickle, sys, tinsmith; sampler = pickle.load(sys.stdin.buffer);"
    "params = tinsmith.SamplingParams(max_tokens=50, seed=1);"
    "tokens = tinsmith.ModelInput.from_ints([1, 2, 3]);"
    "print(list(sampler.sample(tokens, 1, params).result().sequences[0].tokens))"
)
ended = subprocess.run(
    [sys.executable, "-c", there], input=pickle.dumps(sampler), capture_output=True, check=True
)
assert eval(ended.stdout) == tokens, ended
""",
        tmp_path,
    )


def test_a_damaged_ledger_is_reported_with_a_fix(tmp_path: Path) -> None:
    with running(
        "client = tinsmith.ServiceClient()\n"
        "client.create_lora_training_client(MODEL, rank=8)\n"
        "say('made')\n"
        "input()\n",
        tmp_path,
    ) as program:
        assert program.hears() == "made"
        wait_caught_up(tmp_path / ".tinsmith", 5)
    (tmp_path / ".tinsmith" / "ledger" / "ledger.sqlite3-wal").unlink()

    refused = run(
        """
try:
    tinsmith.ServiceClient().get_server_capabilities()
except tinsmith.LedgerDamagedError as exc:
    say(exc)
""",
        tmp_path,
    )
    assert "TINSMITH_SERVE_ACCEPT_LOSS=true" in refused.stdout

    accepted = run(
        "say(len(tinsmith.ServiceClient().get_server_capabilities().supported_models))",
        tmp_path,
        TINSMITH_SERVE_ACCEPT_LOSS="true",
    )
    assert "are lost" in accepted.stderr
    run("tinsmith.ServiceClient().get_server_capabilities()", tmp_path)
