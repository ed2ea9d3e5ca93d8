"""A game of Werewolves between AgentScope agents. The roles that `trainable_targets` names are trained."""

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.pipeline import MsgHub, fanout_pipeline
from agentscope.tool import Toolkit

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from tutorial.example_werewolves import game
from tutorial.example_werewolves.game import SEER, WEREWOLF, Ask, Result, Roles


class Werewolves(Workflow):
    """A moderator plays a game with one agent per player. Each agent's role is its target tag."""

    name = "werewolves"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        data = workflow_task.metadata
        roles: Roles = dict(zip(data["players"], data["roles"], strict=True))
        agents = {player: make_agent(player, roles, model_tuner) for player in roles}
        result, speeches = await moderate(agents, roles)

        trained = {call.agent_name for call in model_tuner.calls if call.trained}
        won = {player: result.werewolves_win == (role == WEREWOLF) for player, role in roles.items()}
        claims = [f"{SEER}." in speech for player, speech in speeches if roles[player] == WEREWOLF]
        return WorkflowOutput(
            reward={player: float(won[player]) for player in roles if player in trained},
            log_metrics={
                "werewolves_win": float(result.werewolves_win),
                "days": result.days,
                "werewolf_claims_to_be_seer": sum(claims) / len(claims) if claims else 0.0,
            },
        )


async def moderate(agents: dict[str, ReActAgent], roles: Roles) -> tuple[Result, list[tuple[str, str]]]:
    """Play a game. Return its result, and the speeches with their players."""
    moderator, answers = game.play(roles), None
    speeches: list[tuple[str, str]] = []
    while True:
        try:
            event = moderator.send(answers)
        except StopIteration as end:
            return end.value, speeches
        listeners = [agents[player] for player in event.players]
        message = Msg("moderator", event.text, role="user")
        if not isinstance(event, Ask):
            answers = None
            async with MsgHub(listeners, enable_auto_broadcast=False) as hub:
                await hub.broadcast(message)
            continue
        replies = await fanout_pipeline(listeners, message)  # concurrently: no player hears the others
        answers = {player: reply.get_text_content() or "" for player, reply in zip(event.players, replies, strict=True)}
        if event.text == game.SPEAK:
            speeches += answers.items()


def make_agent(player: str, roles: Roles, model_tuner: ModelTuner) -> ReActAgent:
    """Return the agent of a player. Its target tag in the configuration is its role."""
    agent = ReActAgent(
        name=player,
        sys_prompt=game.instruction(player, roles),
        model=model_tuner.as_agentscope_model(agent_name=player, target_tag=roles[player]),
        formatter=OpenAIChatFormatter(),
        toolkit=Toolkit(),
        max_iters=1,
    )
    agent.set_console_output_enabled(False)
    return agent
