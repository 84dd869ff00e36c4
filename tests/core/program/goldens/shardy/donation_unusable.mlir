// other bytes, another memory, other pieces, and one argument too many
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  func.func public @main(%arg0: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %arg1: tensor<16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, %arg2: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>, tf.aliasing_output = 2 : i32}, %arg3: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}) -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}, tensor<16xf32> {mhlo.memory_kind = "pinned_host", sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}, tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}, tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}) {
    %0 = stablehlo.custom_call @annotate_device_placement(%arg1) {backend_config = "", has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}} : (tensor<16xf32>) -> tensor<16xf32>
    return %arg0, %0, %arg2, %arg3 : tensor<8x8xf32>, tensor<16xf32>, tensor<4x8xf32>, tensor<4x8xf32>
  }
}

// f got 3 donated arguments whose buffers no result can take over: leave them out of donate_argnums, or follow the advice:
//   halved: float32[8,8] as P('x'): a value has its type, but is sharded as P('y'), 64 bytes on each device, and the argument as P('x'), 128 bytes on each device: pass halved as P('y')
//   moved: float32[16] as P('x'): a value has its type, but is in the memory pinned_host, and the argument in device: give out_shardings with memory_kind='device'
//   second: float32[4,8] as P(): a value: float32[4,8] as P() has room for it, but takes over the buffers of first already
