"""Functions of other packages, changed for every name that a script has of them."""

import inspect

from octavo.compat.changes import Changes, copy_of


def total(first, second=2, *, third=3):
    return first + second + third


def test_a_redirected_function_is_another_by_every_name_until_it_is_taken_back():
    early, original, changes = total, copy_of(total), Changes()
    signature = inspect.signature(total)

    def doubled(first, second=2, *, third=3, group=None):
        return 2 * original(first, second, third=third)

    changes.redirect(total, doubled)
    assert early(1) == 12
    assert early(1, 1, third=1, group="any") == 6
    assert "group" in inspect.signature(early).parameters
    assert original(1) == 6
    changes.undo()
    assert early(1) == original(1) == 6
    assert early(1, third=0) == 3
    assert inspect.signature(early) == signature
