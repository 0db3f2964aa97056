"""How policies are trained: learners, the recipe for each policy, and the policy that comes trained."""
