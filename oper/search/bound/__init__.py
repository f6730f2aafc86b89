"""A lower bound of the step over all plans: relaxation, column generation, branch and bound."""
