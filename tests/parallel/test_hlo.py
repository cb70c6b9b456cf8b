"""Facts about programs: from a text made for it, and from what XLA compiles here."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specjax.parallel import hlo, hlo_facts
from specjax.parallel.mesh import make_mesh

# A loop that data end around one of 6 iterations, in the words of XLA's TPU compiler:
# w is fetched in two slices into a scratchpad (S(3)), v is read in each iteration of
# the inner loop, a cache is updated in place, and the head is transposed before.
TEXT = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {1}: (3, {}, may-alias), {2}: (4, {}, may-alias) }, entry_computation_layout={()->()}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%update (c: bf16[64,100], n: bf16[8,100]) -> bf16[64,100] {
  %c = bf16[64,100]{1,0:T(8,128)(2,1)} parameter(0)
  %n = bf16[8,100]{1,0:T(8,128)(2,1)} parameter(1)
  %zero = s32[] constant(0)
  ROOT %written = bf16[64,100]{1,0:T(8,128)(2,1)} dynamic-update-slice(%c, %n, %zero, %zero)
}

%inner_cond (p.1: (s32[], bf16[128,256])) -> pred[] {
  %p.1 = (s32[], bf16[128,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %limit = s32[] constant(6)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT
}

%inner_body (p.2: (s32[], bf16[128,256])) -> (s32[], bf16[128,256]) {
  %p.2 = (s32[], bf16[128,256]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %v.2 = bf16[128,256]{1,0:T(8,128)(2,1)} get-tuple-element(%p.2), index=1
  %used = f32[8,128]{1,0:T(8,128)S(3)} fusion(%v.2), kind=kOutput, calls=%use, backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %t.2 = (s32[], bf16[128,256]{1,0:T(8,128)(2,1)}) tuple(%i.2, %v.2)
}

%use (q: bf16[128,256]) -> f32[8,128] {
  %q = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %dot = f32[8,128]{1,0:T(8,128)S(3)} convolution(%q, %q)
}

%greedy (g: (f32[8,128])) -> f32[8,128] {
  %g = (f32[8,128]{1,0:T(8,128)}) parameter(0)
  ROOT %same = f32[8,128]{1,0:T(8,128)} get-tuple-element(%g), index=0
}

%filtered (h: (f32[8,128])) -> f32[8,128] {
  %h = (f32[8,128]{1,0:T(8,128)}) parameter(0)
  %law = f32[8,128]{1,0:T(8,128)} get-tuple-element(%h), index=0
  ROOT %reduced = f32[8,128]{1,0:T(8,128)} all-reduce(%law), replica_groups={{0,1,2,3}}, to_apply=%add
}

%cond (p.3: (pred[], bf16[256,512], bf16[128,256], bf16[64,100], f32[8,128])) -> pred[] {
  %p.3 = (pred[], bf16[256,512]{1,0:T(8,128)(2,1)}, bf16[128,256]{1,0:T(8,128)(2,1)}, bf16[64,100]{1,0:T(8,128)(2,1)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  ROOT %go = pred[] get-tuple-element(%p.3), index=0
}

%body (p.4: (pred[], bf16[256,512], bf16[128,256], bf16[64,100], f32[8,128])) -> (pred[], bf16[256,512], bf16[128,256], bf16[64,100], f32[8,128]) {
  %p.4 = (pred[], bf16[256,512]{1,0:T(8,128)(2,1)}, bf16[128,256]{1,0:T(8,128)(2,1)}, bf16[64,100]{1,0:T(8,128)(2,1)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %go.4 = pred[] get-tuple-element(%p.4), index=0
  %w.4 = bf16[256,512]{1,0:T(8,128)(2,1)} get-tuple-element(%p.4), index=1
  %v.4 = bf16[128,256]{1,0:T(8,128)(2,1)} get-tuple-element(%p.4), index=2
  %cache.4 = bf16[64,100]{1,0:T(8,128)(2,1)} get-tuple-element(%p.4), index=3
  %law.4 = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p.4), index=4
  %half.1 = ((bf16[256,512]{1,0:T(8,128)(2,1)}), bf16[128,512]{1,0:T(8,128)(2,1)S(3)}, s32[]{:S(2)}) slice-start(%w.4), slice={[0:128], [0:512]}
  %half.2 = ((bf16[256,512]{1,0:T(8,128)(2,1)}), bf16[128,512]{1,0:T(8,128)(2,1)S(3)}, s32[]{:S(2)}) slice-start(%w.4), slice={[128:256], [0:512]}
  %done.1 = bf16[128,512]{1,0:T(8,128)(2,1)S(3)} slice-done(%half.1)
  %done.2 = bf16[128,512]{1,0:T(8,128)(2,1)S(3)} slice-done(%half.2)
  %here = bf16[256,512]{1,0:T(8,128)(2,1)S(3)} custom-call(%done.1, %done.2), custom_call_target="ConcatBitcast"
  %y.4 = bf16[8,100]{1,0:T(8,128)(2,1)S(3)} fusion(%here), kind=kOutput, calls=%use, backend_config={"window_config":{"estimated_cycles":"7"}}
  %next = bf16[64,100]{1,0:T(8,128)(2,1)} fusion(%cache.4, %y.4), kind=kLoop, calls=%update
  %zero.4 = s32[] constant(0)
  %t.4 = (s32[], bf16[128,256]{1,0:T(8,128)(2,1)}) tuple(%zero.4, %v.4)
  %inner = (s32[], bf16[128,256]{1,0:T(8,128)(2,1)}) while(%t.4), condition=%inner_cond, body=%inner_body
  %given = (f32[8,128]{1,0:T(8,128)}) tuple(%law.4)
  %branch = f32[8,128]{1,0:T(8,128)} conditional(%go.4, %given, %given), branch_computations={%greedy, %filtered}
  %all = f32[8,128]{1,0:T(8,128)} all-reduce(%branch), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add, metadata={op_name="jit(f)/while/body/out"}
  ROOT %t.5 = (pred[], bf16[256,512]{1,0:T(8,128)(2,1)}, bf16[128,256]{1,0:T(8,128)(2,1)}, bf16[64,100]{1,0:T(8,128)(2,1)}, f32[8,128]{1,0:T(8,128)}) tuple(%go.4, %w.4, %v.4, %next, %all)
}

ENTRY %main (w: bf16[256,512], v: bf16[128,256], u: bf16[512,300], cache: bf16[64,100], law: f32[8,128], go: pred[]) -> (pred[], bf16[256,512], bf16[128,256], bf16[64,100], f32[8,128]) {
  %w = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="params[\\'w\\']"}
  %v = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="params[\\'v\\']"}
  %u = bf16[512,300]{1,0:T(8,128)(2,1)} parameter(2), metadata={op_name="params[\\'u\\']"}
  %cache = bf16[64,100]{1,0:T(8,128)(2,1)} parameter(3), metadata={op_name="cache"}
  %law = f32[8,128]{1,0:T(8,128)} parameter(4), metadata={op_name="law"}
  %go = pred[] parameter(5), metadata={op_name="go"}
  %u.t = bf16[512,300]{0,1:T(8,128)(2,1)} copy(%u)
  %t.0 = (pred[], bf16[256,512]{1,0:T(8,128)(2,1)}, bf16[128,256]{1,0:T(8,128)(2,1)}, bf16[64,100]{1,0:T(8,128)(2,1)}, f32[8,128]{1,0:T(8,128)}) tuple(%go, %w, %v, %cache, %law)
  ROOT %loop = (pred[], bf16[256,512]{1,0:T(8,128)(2,1)}, bf16[128,256]{1,0:T(8,128)(2,1)}, bf16[64,100]{1,0:T(8,128)(2,1)}, f32[8,128]{1,0:T(8,128)}) while(%t.0), condition=%cond, body=%body
}
"""  # noqa: E501
W, V = 256 * 512 * 2, 128 * 256 * 2  # bytes
ROW = 8 * 128 * 2  # of an update of the cache: 100 columns are padded to 128
LAW = 8 * 128 * 4


@pytest.fixture(scope='module')
def module():
  return hlo.parse(TEXT)


def test_loops_and_aliases(module):
  loop = hlo.data_loop(module)
  assert (loop.body, loop.trips) == ('body', None)
  inner = module.computations['body'].instructions['inner']
  assert module.loop(inner).trips == 6
  assert module.aliases == ((1, 3), (2, 4))
  assert list(hlo.parameters(module)) == ["params['w']", "params['v']", "params['u']"]


def test_padding_counts():
  tiled = hlo.Shape('bf16', (64, 137, 64), (1, 2, 0), (8, 128))
  assert tiled.nbytes == 64 * 64 * 256 * 2
  assert tiled.size == 64 * 64 * 137
  assert hlo.Shape('pred', (3,), (0,), (512,)).nbytes == 512
  assert hlo.Shape('s32', ()).nbytes == 4


def test_traffic_counts_the_inner_loop_slices_and_updates(module):
  found = hlo_facts.traffic(module, 'body')
  # w in two halves, v six times, the all-reduce of the law; the cheap branch moves
  # nothing, and scratchpads do not count.
  assert found.read == W + 6 * V + LAW
  assert found.written == ROW + LAW
  assert hlo_facts.traffic(module, 'inner_body') == (V, 0)


def test_reads_of_each_parameter(module):
  found = hlo_facts.reads(module, 'body')
  assert found == {"params['w']": 1.0, "params['v']": 6.0, "params['u']": 0.0}
  whole = hlo_facts.reads(module, 'main')
  assert whole["params['u']"] == pytest.approx(1.0)


def test_copies_and_prefetches(module):
  assert hlo_facts.weight_copies(module, 'body') == []
  (copy,) = hlo_facts.weight_copies(module, 'main')
  assert copy.name == 'u.t'
  # A prefetch that turns the layout is one, where it brings the whole.
  turned = TEXT.replace(
    'bf16[128,512]{1,0:T(8,128)(2,1)S(3)}, s32[]{:S(2)}) slice-start(%w.4)',
    'bf16[256,512]{0,1:T(8,128)(2,1)S(3)}, s32[]{:S(2)}) slice-start(%w.4)',
  )
  assert len(hlo_facts.weight_copies(hlo.parse(turned), 'body')) == 2


def test_collectives_of_the_cheap_branch(module):
  (found,) = hlo_facts.collectives(module, 'body')
  assert found == ('all-reduce', LAW, 4, 1, 'jit(f)/while/body/out')
  (dear,) = hlo_facts.collectives(module, 'filtered')
  assert dear.group == 4


def test_a_gathered_weight_is_found():
  line = '  %half.1 ='
  gather = (
    '  %g = bf16[1024,512]{1,0:T(8,128)(2,1)} all-gather(%w.4), '
    'replica_groups=[1,4]<=[4], dimensions={0}\n'
  )
  module = hlo.parse(TEXT.replace(line, gather + line, 1))
  assert [i.name for i in hlo_facts.weight_gathers(module, 'body')] == ['g']
  assert hlo_facts.weight_gathers(hlo.parse(TEXT), 'body') == []


def test_writes_and_cycles(module):
  assert hlo_facts.count(module, 'body', 'dynamic-update-slice') == 1
  assert hlo_facts.count(module, 'body', 'scatter') == 0
  assert hlo_facts.cycles(module, 'body') == 7 + 6 * 100


@pytest.mark.parametrize(
  'line',
  [
    '  %out = token[] outfeed(%y.4, %y.4), outfeed_shape=f32[8]',
    '  %out = (f32[8]{0}, u32[], token[]) send(%y.4, %y.4), is_host_transfer=true',
    '  %out = (bf16[8,100]{1,0:S(5)}, bf16[8,100]{1,0}, u32[]) copy-start(%y.4)',
    '  %out = () custom-call(%y.4), custom_call_target="xla_ffi_python_cpu_callback"',
  ],
)
def test_host_transfers_are_found(module, line):
  assert hlo_facts.host_transfers(module, 'body') == []
  text = TEXT.replace('  %zero.4 =', f'{line}\n  %zero.4 =')
  assert len(hlo_facts.host_transfers(hlo.parse(text), 'body')) == 1


def test_bad_texts():
  with pytest.raises(ValueError, match='text of a compiled module'):
    hlo.parse('')
  straight = 'HloModule m\n\nENTRY %e (a: f32[]) -> f32[] {\n'
  straight += '  ROOT %a = f32[] parameter(0)\n}\n'
  with pytest.raises(ValueError, match='0 loops that data end'):
    hlo.data_loop(hlo.parse(straight))


# What XLA compiles for CPUs.


def decode(params, x, limit, *, note=lambda x: None):
  """A loop that data end, with a loop of 3 iterations inside."""

  def body(x):
    note(x)
    x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ params['v']), x)
    return x @ params['w']

  return jax.lax.while_loop(lambda x: jnp.sum(x) < limit, body, x)


def compile_text(function, *arguments, **options):
  return jax.jit(function, **options).lower(*arguments).compile().as_text()


PARAMS = {'v': jnp.ones((128, 128)), 'w': jnp.ones((128, 128))}
X = jnp.ones((1, 128))


def test_a_loop_compiled_here(optimised):
  module = hlo.parse(compile_text(decode, PARAMS, X, 1.0))
  loop = hlo.data_loop(module)
  assert hlo_facts.reads(module, loop.body) == {"params['v']": 3.0, "params['w']": 1.0}
  assert hlo_facts.host_transfers(module, loop.body) == []


def test_a_callback_in_the_loop_is_a_host_transfer(optimised):
  note = functools.partial(jax.debug.callback, lambda x: None)
  text = compile_text(functools.partial(decode, note=note), PARAMS, X, 1.0)
  module = hlo.parse(text)
  assert hlo_facts.host_transfers(module, hlo.data_loop(module).body)


def test_collectives_on_a_mesh(optimised):
  mesh = make_mesh(2, 4)
  rows = NamedSharding(mesh, PartitionSpec('model', None))
  whole = NamedSharding(mesh, PartitionSpec())
  placed = ({'v': whole, 'w': rows}, whole, whole)
  text = compile_text(decode, PARAMS, X, 1.0, in_shardings=placed, out_shardings=whole)
  module = hlo.parse(text)
  found = hlo_facts.collectives(module, hlo.data_loop(module).body)
  assert {(each.kind, each.group) for each in found} == {('all-reduce', 4)}
