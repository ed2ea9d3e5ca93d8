"""The agent: a program that talks to the model in training, as long and with whatever tools it likes."""

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask, bp


class DigitsAgent(Workflow):
    """Asks once, and hands the answer to the judge."""

    name = "digits_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode."""
        messages = [
            {"role": "system", "content": "Answer in digits."},
            {"role": "user", "content": workflow_task.task.main_query},
        ]
        answer = await model_tuner.chat(messages)
        bp("ANSWER")  # stops here with --db=ANSWER, and costs nothing without
        return WorkflowOutput(metadata={"said": answer.parsed.content})
