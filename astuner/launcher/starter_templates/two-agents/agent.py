"""Two agents that play together: one answers, the other reviews. Both are trained, each with its own reward."""

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask, bp


def share_of_digits(text: str) -> float:
    """Return the share of digits in a text, which even a random model can learn."""
    return sum(character in "0123456789" for character in text) / max(len(text), 1)


class DigitsAgent(Workflow):
    """A solver answers, and a reviewer comments on the answer."""

    name = "digits_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode."""
        question = {"role": "user", "content": workflow_task.main_query}
        answer = await model_tuner.chat([question], agent_name="solver")
        review = {"role": "user", "content": f"{workflow_task.main_query} {answer.text} Is this right?"}
        verdict = await model_tuner.chat([review], agent_name="reviewer")
        bp("ANSWER")  # stops in the debugger with --db=ANSWER
        rewards = {"solver": share_of_digits(answer.text), "reviewer": 1.0 - share_of_digits(verdict.text)}
        return WorkflowOutput(reward=rewards, is_success=rewards["solver"] == 1.0)
