"""What files refuse in words, where it gave another client's, half or no result before."""

import numpy as np
import pytest

from fisherjax import files
from fisherjax.algorithms import Update


@pytest.mark.parametrize("client", [3, 7, -1, 1.0, "0", [0], True])
def test_a_client_that_is_not_there_is_refused(client):
    updates = Update({"params": {"w": np.arange(3.0)}}, "params")
    assert files.of_client(updates, np.int32(2)).values["params"]["w"] == 2
    with pytest.raises(IndexError, match=r"^client is .*; expected 0 to 2"):
        files.of_client(updates, client)


def test_one_client_is_not_selected_from_an_update_of_one():
    one = Update({"params": {"w": np.ones((3, 2)), "b": np.ones(2)}}, "params")
    with pytest.raises(ValueError, match=r"leading axes .* expected the number of clients"):
        files.of_client(one, 1)
