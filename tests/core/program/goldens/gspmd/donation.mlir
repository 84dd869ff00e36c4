// an alias where all is settled, an offer where it is not, nothing where nothing fits
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<8x8xf32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}", tf.aliasing_output = 1 : i32}, %arg1: tensor<8x8xf32> {jax.buffer_donor = true, mhlo.sharding = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"}, %arg2: tensor<4x8xf32>, %arg3: tensor<64xi32> {mhlo.sharding = "{devices=[2,4]<=[8] last_tile_dim_replicate}", tf.aliasing_output = 3 : i32}, %arg4: tensor<3xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"}, tensor<4x8xf32> {mhlo.sharding = "{replicated}"}, tensor<64xi32> {mhlo.sharding = "{devices=[2,4]<=[8] last_tile_dim_replicate}"}, tensor<3xf32> {mhlo.sharding = "{replicated}"}) {
    return %arg0, %arg1, %arg2, %arg3, %arg4 : tensor<8x8xf32>, tensor<8x8xf32>, tensor<4x8xf32>, tensor<64xi32>, tensor<3xf32>
  }
}
