// other bytes, another memory, other pieces, and one argument too many
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x8xf32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"}, %arg1: tensor<16xf32> {mhlo.sharding = "{devices=[2,4]<=[8] last_tile_dim_replicate}"}, %arg2: tensor<4x8xf32> {mhlo.sharding = "{replicated}", tf.aliasing_output = 2 : i32}, %arg3: tensor<4x8xf32> {mhlo.sharding = "{replicated}"}) -> (tensor<8x8xf32> {mhlo.sharding = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"}, tensor<16xf32> {mhlo.memory_kind = "pinned_host", mhlo.sharding = "{devices=[2,4]<=[8] last_tile_dim_replicate}"}, tensor<4x8xf32> {mhlo.sharding = "{replicated}"}, tensor<4x8xf32> {mhlo.sharding = "{devices=[2,4]<=[8]}"}) {
    %0 = stablehlo.custom_call @annotate_device_placement(%arg1) {backend_config = "", has_side_effect = true, mhlo.frontend_attributes = {_xla_buffer_placement = "pinned_host"}} : (tensor<16xf32>) -> tensor<16xf32>
    return %arg0, %0, %arg2, %arg3 : tensor<8x8xf32>, tensor<16xf32>, tensor<4x8xf32>, tensor<4x8xf32>
  }
}

// f was given 3 donated arguments whose buffers no result can take over; leave them out of donate_argnums:
//   halved: float32[8,8]: the results of its size are cut into other pieces
//   moved: float32[16]: the results of its size live in another memory (pinned_host)
//   second: float32[4,8]: the results of its size take over other donated arguments already
