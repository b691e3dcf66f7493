"""What an answer is dressed in: the same number in many forms, and what only looks like it. N is the right number."""

import time

import pytest

from penstock.environments.rewards import boxed_answer, final_answer, last_number, marked_answer, numbers_in

NUMBERS = (18, 1234, 5)


def earned(grader, said, right):
    return grader([said], [f"So it is {right}.\n#### {right}"])[0]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("dressing", "final", "last"),
    [
        # plain forms of the number
        ("#### {N}", 1, 1),
        ("#### ${N:,}.00", 1, 1),
        ("#### {N}.0", 1, 1),
        ("#### {N:,}", 1, 1),
        ("#### **{N}**", 1, 1),
        ("**#### {N}**", 1, 1),
        ("#### `{N}`", 1, 1),
        ("#### {N} eggs", 1, 1),
        ("#### {N}%", 1, 1),
        ("#### ${N}$", 1, 1),
        (r"#### \({N}\)", 1, 1),
        ("#### {N} dollars per day.", 1, 1),
        ("#### ${N}/day", 1, 1),
        ("#### {N}km", 1, 1),
        ("#### {N} cm^2", 1, 1),
        ("#### {N} m²", 1, 1),
        ("#### {N}-day trip", 1, 1),
        ("#### {N}</answer>", 1, 1),
        ("####\n {N}", 1, 1),
        ("#### {N}\nThat is {M} less one.", 1, 1),
        # other numbers
        ("#### {M}", 0, 0),
        ("#### -{N}", 0, 0),
        ("#### {N}0", 0, 0),
        ("#### {N}\n#### {M}", 0, 0),
        ("#### 1{N}", 0, 0),
        ("#### {N}.5", 0, 0),
        # right, and once refused
        (r"#### \boxed{{{N}}}", 1, 1),
        ("#### = {N}", 1, 1),
        ("#### a+1={N}", 1, 1),
        ("#### {K} + 1 = {N}", 1, 1),
        ("#### USD {N}", 1, 1),
        ("#### US${N}", 1, 1),
        ("#### +{N}", 1, 1),
        (r"#### \${N}", 1, 1),
        ("#### x = {N}", 1, 1),
        ("#### ≈ {N}", 1, 1),
        ("#### The answer is {N}.", 1, 1),
        # a box goes before a mark
        (r"\boxed{{{N}}}", 1, 1),
        (r"\[\boxed{{\${N:,}}}\]", 1, 1),
        (r"\boxed{{{N}\text{{ eggs}}}}", 1, 1),
        (r"\boxed{{\text{{{N}}}}}", 1, 1),
        (r"\boxed{{{N}\%}}", 1, 1),
        (r"\boxed{{x = {N}}}", 1, 1),
        (r"\boxed{{{N}^\circ}}", 1, 1),
        (r"\boxed {{ {N} }}", 1, 1),
        (r"\boxed{{{M}}} no, \boxed{{{N}}}", 1, 1),
        (r"\boxed{{{N}}} no, \boxed{{{M}}}", 0, 0),
        (r"\boxed{{{N}}} and #### {M}", 1, 1),
        (r"\boxed{{{N}", 0, 1),
        # neither
        ("The answer is {N}.", 0, 1),
        ("{K} + 1 = {N}", 0, 1),
        # expressions and alternatives
        ("#### {N}/2", 0, 0),
        ("#### {N} or {M}", 0, 0),
        ("#### {M} or {N}", 0, 0),
        ("#### either {N} or more", 0, 0),
        ("#### {N}, {M}", 0, 0),
        ("#### {N},{M}", 0, 0),
        ("#### {N} {M}", 0, 0),
        ("#### {N} and {M}", 0, 0),
        ("#### {N} eggs or {M} eggs", 0, 0),
        ("#### {N} eggs and {M} hens", 0, 0),
        ("#### {N}-{M}", 0, 0),
        ("#### {N} to {M}", 0, 0),
        ("#### {N}e2", 0, 0),
        ("#### {N}E+2", 0, 0),
        ("#### {N} * 2", 0, 0),
        ("#### {N}*2", 0, 0),
        ("#### {N}**2", 0, 0),
        ("#### **{N}**2", 0, 0),
        ("#### {N}^2", 0, 0),
        ("#### {N}²", 0, 0),
        ("#### {N}½", 0, 0),
        ("#### {N} x 2", 0, 0),
        ("#### {N} + 2", 0, 0),
        ("#### {N} − 2", 0, 0),
        ("#### 2 + {N}", 0, 0),
        ("#### x - {N}", 0, 0),
        ("#### {N}:30", 0, 0),
        ("#### {N}x", 0, 0),
        ("#### {N}k", 0, 0),
        ("#### {N} thousand", 0, 0),
        ("#### {N} squared", 0, 0),
        ("#### {N} = {M}", 0, 0),
        ("#### x > {N}", 0, 0),
        ("#### x >= {N}", 0, 0),
        ("#### x != {N}", 0, 0),
        ("#### not {N}", 0, 0),
        ("#### at least {N}", 0, 0),
        ("#### {N}.5.1", 0, 0),
        ("#### --{N}", 0, 0),
        (r"#### \frac{{{N}}}{{2}}", 0, 0),
        (r"\boxed{{\frac{{{N}}}{{2}}}}", 0, 0),
        (r"\boxed{{{N}, {M}}}", 0, 0),
        (r"\boxed{{{N} \text{{ or }} {M}}}", 0, 0),
        (r"\boxed{{{N} \times 2}}", 0, 0),
        (r"\boxed{{{N}!}}", 0, 0),
        ("#### 2*{N}/2", 0, 0),  # right, but arithmetic: the extra `math`
        ("{N}/2", 0, 0),
        ("2/{N}", 0, 0),
        ("{M} or {N}", 0, 0),
        ("2 * {N}", 0, 0),
        ("{N}e2", 0, 0),
        # signs
        ("#### −{N}", 0, 0),
        ("#### - {N}", 0, 0),
        ("−{N}", 0, 0),
        # a second number of lower standing
        ("#### {N} eggs in 7 days", 1, 1),
        ("#### {N} eggs for 2 dozen people at $3", 1, 1),
        ("####", 0, 0),
        ("", 0, 0),
    ],
)
def test_each_dressing_earns_what_it_should(dressing, final, last, number):
    said = dressing.format(N=number, M=number + 1, K=number - 1)
    assert (earned(final_answer, said, number), earned(last_number, said, number)) == (final, last)


@pytest.mark.parametrize(
    "dressing", ["#### -5", "#### −5", "#### - 5", "#### −$5", "#### -$5", "#### $-5", r"\boxed{-5}", "#### x = −5"]
)
def test_negative_answers(dressing):
    assert earned(final_answer, dressing, "-5") == earned(last_number, dressing, "-5") == 1
    assert earned(final_answer, dressing, "5") == earned(last_number, dressing, "5") == 0


@pytest.mark.parametrize(
    ("said", "boxed", "marked"),
    [
        (r"\boxed{18}", 1, 0),
        ("#### 18", 0, 1),
        (r"\boxed{18} #### 18", 1, 1),
        (r"\boxed{18} #### 19", 1, 0),
        (r"\boxed{19} #### 18", 0, 1),
        (r"#### \boxed{18}", 1, 1),
        ("18", 0, 0),
    ],
)
def test_graders_of_one_form(said, boxed, marked):
    assert (earned(boxed_answer, said, 18), earned(marked_answer, said, 18)) == (boxed, marked)
    assert boxed_answer([said], ["18"], finish_reason=["length"]) == [0.0]


@pytest.mark.parametrize(
    "right", ["18", 18, 18.0, "$18", "18 eggs", r"\boxed{18}", "9 + 9 = 18", "9 + 9 = 18\n#### 18"]
)
def test_references_in_many_forms(right):
    assert final_answer(["#### 18"], [right]) == [1.0]


@pytest.mark.parametrize("right", ["18/2", r"\frac{18}{2}", "18 or 19", "(1, 19)", "eighteen", "#### 1 or 2", True, ""])
def test_a_reference_that_states_no_number_rewards_nobody(right):
    said = ["#### 18", "#### 2", "#### 9", "#### 19", "#### 1"]
    assert final_answer(said, [right] * 5) == last_number(said, [right] * 5) == [0.0] * 5


@pytest.mark.parametrize("unit", ["*", "* ", "22,", "\\boxed{", "#", "-", " \n", "{", "\\text{", "1 ", "<a", "= "])
def test_hostile_answers_take_no_long(unit):
    began_s = time.process_time()
    numbers_in(unit * 40_000)  # what shaped_answer reads
    said = [unit * 40_000, "#### " + unit * 40_000, "\\boxed{" + unit * 40_000 + "}"]
    assert final_answer(said, ["18"] * 3) == last_number(said, ["18"] * 3) == [0.0] * 3
    assert time.process_time() - began_s < 5
