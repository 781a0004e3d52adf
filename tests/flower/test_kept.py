"""What a side keeps survives rounds, lost replies and the end of its process."""

import jax
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms
from tests.flower.conftest import CLIENTS, KEY, MODEL, SGD, SIZE, distance, warned

SCAFFOLD = algorithms.scaffold()


@pytest.fixture(scope="module")
def sides(flower, world):
    """Make the client's app and the server."""

    def make(algorithm, *, folder=None, **options):
        how = {"params": world.params, "batch_size": SIZE, "folder": folder}
        app = flower.client_app(algorithm, MODEL, SGD, world.load, **how)
        own = {"example": world.example, "num_clients": CLIENTS, "key": KEY}
        return app, flower.strategy(algorithm, MODEL, world.params, **own | options)

    return make


def places(*numbers):
    return [{"partition-id": place} for place in numbers]


@pytest.fixture(scope="module")
def uninterrupted(flower, sides):
    """Return the state after each of three rounds."""
    app, server = sides(SCAFFOLD)
    states = []
    server.run(flower.InProcess(app, CLIENTS), 3, lambda state, _: states.append(state))
    return states


@pytest.mark.long
def test_both_sides_go_on_after_their_processes_end(flower, sides, tmp_path, uninterrupted):
    state, folder = None, tmp_path / "not" / "yet"
    for number in (1, 2, 3):
        # New contexts and a new strategy: all that is left is the folder and the server's state.
        app, server = sides(SCAFFOLD, folder=folder, state=state)
        server.run(flower.InProcess(app, CLIENTS), number)
        state = server.state
        assert distance(tuple(state), tuple(uninterrupted[number - 1])) == 0
    assert len(list(folder.glob("client-*.safetensors"))) == CLIENTS


@pytest.mark.long
def test_without_a_folder_a_client_that_ended_starts_afresh_and_says_so(flower, sides):
    app, server = sides(SCAFFOLD)
    server.run(flower.InProcess(app, CLIENTS), 1)
    with warned("state of round 0.*starts afresh. Pass a folder"):
        server.run(flower.InProcess(app, CLIENTS), 2)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [SCAFFOLD, algorithms.fedper("second")])
def test_a_lost_reply_is_a_client_that_took_no_part(flower, sides, tmp_path, algorithm):
    """The client trained, but keeps what it had before, as the server's sums lack its update."""

    class Lossy(flower.InProcess):
        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            lost = {
                x.metadata.message_type == "train" and x.metadata.src_node_id == 3 for x in found
            }
            return [] if True in lost else found

    results = []
    for grid, configurations in ((Lossy, CLIENTS), (flower.InProcess, places(0, 1))):
        folder = tmp_path / grid.__name__
        folder.mkdir()
        quick = flower.Terms(timeout=0.01, connect=0.0)
        app, server = sides(algorithm, folder=folder, terms=quick)
        with warned("Client 2 is left out of round 0"):
            server.run(grid(app, configurations), 1)
        app, server = sides(algorithm, folder=folder, state=server.state)
        server.run(flower.InProcess(app, CLIENTS), 2)
        results.append(server.state)
    assert distance(tuple(results[0]), tuple(results[1])) == 0


@pytest.mark.long
def test_flowers_own_loop_runs_the_same_rounds(flower, sides, uninterrupted):
    app, server = sides(SCAFFOLD)
    result = server.start(flower.InProcess(app, CLIENTS), num_rounds=3)
    assert distance(tuple(server.state), tuple(uninterrupted[-1])) == 0
    assert result.arrays == server.arrays()
    assert [*result.train_metrics_clientapp] == [1, 2, 3]
    # A model of somebody else's loop is the next one's start.
    _, other = sides(SCAFFOLD)
    other.start(flower.InProcess(app, CLIENTS), result.arrays, num_rounds=0)
    assert distance(other.state.params, server.state.params) == 0


@pytest.mark.long
def test_cohorts_are_those_of_simulation(flower, sides, world):
    how = {"optimizer": SGD, "epochs": 1, "batch_size": SIZE, "clients_per_chunk": 1}
    experiment = fj.rounds.federated(MODEL, algorithms.fedavg(), cohort=2, **how)
    state = experiment.init(world.params, CLIENTS)
    runs = fj.rounds.run(experiment, state, world.federation, key=KEY, rounds=4)
    expected = [tuple(done.cohort.tolist()) for _, done in runs]
    app, server = sides(algorithms.fedavg(), cohort=2)
    found = []
    server.run(flower.InProcess(app, CLIENTS), 4, lambda _, report: found.append(report.clients))
    assert found == expected


def test_a_state_of_another_run_is_refused(flower, sides, world):
    _, server = sides(SCAFFOLD)
    state = server.state
    with pytest.raises(ValueError, match=r"state\.algorithm has leaves"):
        sides(algorithms.fedavg(), state=state)
    with pytest.raises(ValueError, match=r"state\.accepted has leaves"):
        sides(SCAFFOLD, state=state._replace(accepted=np.zeros(7, int)))
    with pytest.raises(TypeError, match="ServerState"):
        sides(SCAFFOLD, state=tuple(state))
    assert jax.tree.leaves(state)


@pytest.mark.long
def test_later_rounds_compile_nothing(flower, sides, compilations):
    app, server = sides(algorithms.fedavg())
    grid = flower.InProcess(app, CLIENTS)
    server.run(grid, 2)
    with compilations() as count:
        server.run(grid, 3)
    assert count() == 0
