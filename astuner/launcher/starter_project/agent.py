"""The agent: any program that calls the model in training, with any tools and over any number of turns."""

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask, bp


class DigitsAgent(Workflow):
    """Ask the model once, and pass its answer to the judge."""

    name = "digits_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Run one episode."""
        messages = [
            {"role": "system", "content": "Answer in digits."},
            {"role": "user", "content": workflow_task.task.main_query},
        ]
        answer = await model_tuner.chat(messages)
        bp("ANSWER")  # stops in the debugger with --db=ANSWER
        return WorkflowOutput(metadata={"final_answer": answer.text})
