import gc

import pytest

from megatron_dppo.system.garbage import paused_collection


def fail_in_a_paused_block():
    with paused_collection():
        assert not gc.isenabled()
        raise ValueError("planted")


def test_the_collection_pauses_until_the_end_of_the_block():
    assert gc.isenabled()
    with pytest.raises(ValueError, match="planted"):
        fail_in_a_paused_block()
    assert gc.isenabled()


def test_a_paused_collection_stays_paused_after_an_inner_block():
    with paused_collection():
        with paused_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
